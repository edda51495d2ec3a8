"""The demo model, as small as the tests of a module allow."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tokenloom import LLM


@pytest.fixture(scope="module")
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes an ``LLM`` with the demo model on one thread; it is closed after the module."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM("tokenloom-demo", dtype="float32", max_model_len=256, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    torch.set_num_threads(threads)
