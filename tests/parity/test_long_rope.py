"""Long rope up to the original context and beyond it: tokens are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import compute_case, save_random

ORIGINAL = 64
ENTRIES: dict[str, Any] = {
    "pad_token_id": 0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}
TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("phi3", tmp_path_factory.mktemp("long"), **ENTRIES)


@pytest.mark.parametrize(
    ("max_model_len", "lengths"),
    [(ORIGINAL, (ORIGINAL - TOKENS, 3, 20)), (160, (ORIGINAL + 1, 140, 90))],
    ids=["short factors", "long factors"],
)
def test_tokens_are_those_of_transformers(max_model_len: int, lengths: tuple[int, ...], checkpoint: Path) -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    prompts = [[(i * 7 + j * 3) % 120 + 5 for j in range(length)] for i, length in enumerate(lengths)]
    # Without a cache, which transformers would keep in the factors of a shorter sequence.
    cases = [compute_case(model, prompt, TOKENS, use_cache=False) for prompt in prompts]
    engine = Engine(checkpoint, budget=16, max_num_seqs=4, num_blocks=40, max_model_len=max_model_len)
    assert ("long-rope" in engine.core.ready.numerics) == (max_model_len > ORIGINAL)
    assert_identical(cases, engine.generate)
