"""What earlier owners left in a block, behind the tokens of its present owner, changes nothing, in any backend."""

import shutil
from itertools import product

import pytest
import torch

from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, CPU, Step, make_step, owned_slots, run, shape
from tests.pairwise import pairs
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend

BACKENDS = ["torch", "reference", *(["cpu"] if shutil.which("g++") else [])]
HEADS = [(4, 4), (8, 2), (6, 1), (16, 1)]
"""Queries and keys; some processors have a kernel of their own for each."""
KERNELS = [*product(BACKENDS, [torch.float32, torch.bfloat16], HEADS)]
LEFT = [float("nan"), float("inf"), float("-inf"), 3e38]


def leave_behind(step: Step, value: float) -> None:
    """Fill every slot of the cache that holds no token of the step's requests."""
    step.cache.transpose(2, 3)[:, ~owned_slots(step)] = value


@pytest.mark.parametrize(("kernel", "batch", "left", "window"), pairs(KERNELS, BATCHES, LEFT, [None, 7, 40]))
def test_what_lies_behind_a_request_s_tokens_is_not_read(
    kernel: tuple[str, torch.dtype, tuple[int, int]], batch: str, left: float, window: int | None
) -> None:
    name, dtype, (num_heads, num_kv_heads) = kernel
    config = shape(num_kv_heads, dtype, num_heads)
    step = make_step(*BATCHES[batch], num_heads, config)
    backend = make_attention_backend(name, config, BLOCK_SIZE, CPU)
    clean, _ = run(backend, step, window)
    leave_behind(step, left)
    found, _ = run(backend, step, window)
    assert clean.isfinite().all()
    assert torch.equal(found, clean)
