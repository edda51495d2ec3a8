"""Shows the progress bar of the offline API."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm


class Progress:
    """Counts finished prompts and estimates speeds. Use it as a context manager."""

    def __init__(self, num_prompts: int, use_tqdm: bool | Callable[..., Any]) -> None:
        """``use_tqdm``: whether to show a bar, or a function that makes it."""
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._bar = make(
            total=num_prompts,
            desc="Processed prompts",
            dynamic_ncols=True,
            disable=not use_tqdm,
            postfix=_speeds(0, 0, 1.0),
        )
        self._start = time.perf_counter()
        self._input_tokens = self._output_tokens = 0

    def finished(self, input_tokens: int, output_tokens: int) -> None:
        """Count one finished prompt."""
        self._input_tokens += input_tokens
        self._output_tokens += output_tokens
        self._bar.postfix = _speeds(self._input_tokens, self._output_tokens, time.perf_counter() - self._start)
        self._bar.update(1)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _speeds(input_tokens: int, output_tokens: int, seconds: float) -> str:
    return f"est. speed input: {input_tokens / seconds:.2f} toks/s, output: {output_tokens / seconds:.2f} toks/s"
