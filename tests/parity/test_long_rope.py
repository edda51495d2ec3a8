"""Scaled positions up to the original context and beyond it: tokens are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[(i * 7 + j * 3) % 120 + 5 for j in range(length)] for i, length in enumerate(lengths)]


def with_rope(directory: Path, kind: str = "llama", **rope: Any) -> Path:
    return save_random(
        kind, directory, max_position_embeddings=ORIGINAL, rope_parameters={"rope_theta": 10000.0, **rope}
    )


def test_linear_scaling_reaches_its_context(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = with_rope(tmp_path, rope_type="linear", factor=3.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    engine = Engine(path, budget=16, max_num_seqs=4, num_blocks=40, max_model_len=3 * ORIGINAL)
    assert engine.core.ready.max_model_len == 3 * ORIGINAL
    cases = [compute_case(model, prompt, TOKENS) for prompt in prompts_of((20, 3 * ORIGINAL - TOKENS, 100))]
    assert_identical(cases, engine.generate)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("max_model_len", "lengths"), [(None, (ORIGINAL - TOKENS, 3, 20)), (150, (138, 10, 90))], ids=["plain", "stretched"]
)
def test_dynamic_scaling_is_that_of_the_longest_request(
    max_model_len: int | None, lengths: tuple[int, ...], model_impl: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    path = with_rope(tmp_path, rope_type="dynamic", factor=4.0)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    if max_model_len is not None:
        rotary = model.model.rotary_emb
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, torch.device("cpu"), seq_len=max_model_len)
        rotary.rope_type = "default"
    options: dict[str, Any] = {"max_model_len": max_model_len, "model_impl": model_impl}
    engine = Engine(path, budget=16, max_num_seqs=4, num_blocks=40, **options)
    assert engine.core.ready.max_model_len == (max_model_len or ORIGINAL)
    assert ("rope-150" in engine.core.ready.numerics) == (max_model_len == 150)
    assert_identical([compute_case(model, prompt, TOKENS) for prompt in prompts_of(lengths)], engine.generate)


def test_transformers_modules_reach_the_long_context(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rope = dict(ENTRIES["rope_parameters"], partial_rotary_factor=0.75)
    rope |= {name: rope[name][:6] for name in ("short_factor", "long_factor")}
    path = save_random("phi3", tmp_path, **ENTRIES | {"rope_parameters": rope})
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    cases = [compute_case(model, prompt, TOKENS, use_cache=False) for prompt in prompts_of((ORIGINAL + 1, 140, 90))]
    engine = Engine(path, budget=16, max_num_seqs=4, num_blocks=40, max_model_len=160)
    assert_identical(cases, engine.generate)
