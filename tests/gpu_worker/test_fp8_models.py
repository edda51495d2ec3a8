"""What 8-bit floats cost the demo model and a mixture of experts: log probabilities against those of float32.

A GPU computes FP8; here the same layers and caches compute on tensors of the CPU, with PyTorch's operations.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from tokenloom.gpu_worker.attention.attention_backend import FP8_KV
from tokenloom.gpu_worker.attention.cache import to_fp8
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.model_files.model_path import DEMO_MODEL

TEXT = (
    "Here is a story about a dragon. In a little room near the meadow lived a brave dragon called Uma. It was a rainy "
    "morning, and soft rain was falling on the trees. Uma wanted to ride a bicycle, but everything went wrong."
)


class _OtherCache:
    """A model whose KV cache has another dtype."""

    def __init__(self, model: Any, kv_cache_dtype: str) -> None:
        self.config: ModelConfig = replace(model.config, kv_cache_dtype=kv_cache_dtype)
        self.forward, self.compute_logits = model.forward, model.compute_logits


def logprobs(path: Path, ids: Tensor, run_model: Callable[..., list[Tensor]], weights: str | None, kv: str) -> Tensor:
    model = _OtherCache(load_model(path, dtype="float32", quantization=weights), kv)
    with torch.inference_mode():
        # A prefill, and steps of one token that read what it wrote.
        steps = [[len(ids) - 8], *[[1]] * 8]
        logits = run_model(model, [ids], steps)[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(("weights", "kv", "most"), [("fp8", "auto", 0.05), (None, "fp8", 0.05), ("fp8", "fp8", 0.07)])
def test_the_demo_model_s_next_tokens(weights, kv, most, run_model) -> None:
    """The mean difference of the log probability of each next token of a text."""
    ids = torch.tensor(tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(TEXT).ids)
    exact = logprobs(DEMO_MODEL, ids, run_model, None, "auto")
    found = logprobs(DEMO_MODEL, ids, run_model, weights, kv)
    nexts = ids[1:, None]
    gap = (found[:-1].gather(1, nexts) - exact[:-1].gather(1, nexts)).abs().mean()
    assert 0 < gap < most


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("weights", "kv", "most"), [("fp8", "auto", 0.3), (None, "fp8", 0.1)])
def test_a_mixture_of_experts(family, weights, kv, most, save_checkpoint, run_model) -> None:
    """Half of the tokens, of random weights: one whose router chooses another expert changes much."""
    path, ids = save_checkpoint(family), torch.arange(40) * 7 % 199
    exact = logprobs(path, ids, run_model, None, "auto")
    found = logprobs(path, ids, run_model, weights, kv)
    errors = (found - exact).norm(dim=1) / (exact - exact.mean(1, keepdim=True)).norm(dim=1)
    assert 0 < errors.median() < most


def test_elements_beyond_the_format_become_its_largest_and_what_is_not_finite_becomes_nan() -> None:
    found = to_fp8(torch.tensor([1e6, -1e6, 448.0, 0.3, float("nan"), float("inf"), float("-inf")])).float()
    assert found[:3].tolist() == [448.0, -448.0, 448.0]
    assert abs(found[3] - 0.3) <= 0.3 / 16
    assert found[4:].isnan().all()  # the format has no infinity, and a number would hide the fault
    assert FP8_KV.itemsize == 1
