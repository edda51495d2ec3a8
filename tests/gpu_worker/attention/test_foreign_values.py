"""What earlier owners left in a block, behind the tokens of its present owner, changes nothing, in any backend."""

import shutil

import pytest
import torch

from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, CPU, Step, make_step, owned_slots, run, shape
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend

BACKENDS = [
    "torch",
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")),
]
LEFT = [float("nan"), float("inf"), float("-inf"), 3e38]


def leave_behind(step: Step, value: float) -> None:
    """Fill every slot of the cache that holds no token of the step's requests."""
    step.cache.transpose(2, 3)[:, ~owned_slots(step)] = value


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", BACKENDS)
def test_what_lies_behind_a_request_s_tokens_is_not_read(
    name: str, batch: str, dtype: torch.dtype, left: float
) -> None:
    for num_heads, num_kv_heads in ((4, 4), (8, 2), (6, 1), (16, 1)):  # a kernel of its own for each, on some CPUs
        config = shape(num_kv_heads, dtype, num_heads)
        for window in (None, 7, 40):
            step = make_step(*BATCHES[batch], num_heads, config)
            backend = make_attention_backend(name, config, BLOCK_SIZE, CPU)
            clean, _ = run(backend, step, window)
            leave_behind(step, left)
            found, _ = run(backend, step, window)
            assert clean.isfinite().all()
            assert torch.equal(found, clean)
