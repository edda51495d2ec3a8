"""The kernels between a layer's products against PyTorch's operations, in float32 and float16."""

from types import SimpleNamespace

import pytest
import torch

from tests.pairwise import pairs
from tokenloom.gpu_worker.attention.cache import write_slots
from tokenloom.gpu_worker.layers.activation import ACTIVATIONS
from tokenloom.gpu_worker.ops.ops import HeadNorm
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 5e-3, "atol": 5e-3}}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def random(dtype, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "rows", "size", "with_delta", "shift"),
    pairs(TOLERANCE, [1, 5], [256, 100, 7], [False, True], [0.0, 1.0]),
)
def test_add_norm(dtype, rows, size, with_delta, shift):
    residual, weight = random(dtype, rows, size), random(dtype, size)
    delta = random(dtype, rows + 1, size)[1:] if with_delta else None
    results = []
    for ops in (TorchOps(), TritonOps()):
        stream = residual.clone()
        results.append((ops.add_norm(stream, delta, weight, 1e-5, shift), stream))
    (expected, expected_stream), (found, stream) = results
    assert torch.equal(stream, expected_stream)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(dtype, activation):
    for rows, size in ((1, 1030), (3, 7)):
        gate_up = 4 * random(dtype, rows, 2 * size)
        found = TritonOps().gate(gate_up, activation)
        torch.testing.assert_close(found, TorchOps().gate(gate_up, activation), **TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size(activation):
    gate_up = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    large = [1e4, torch.inf] if activation == "relu2" else [100.0, 1e30]
    expected = torch.tensor([[0.0, 0.0, 0.0, *large]])
    torch.testing.assert_close(TritonOps().gate(gate_up, activation), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "head", "heads", "shift"),
    pairs(TOLERANCE, [1, 3], [64, 24, 6], [(4, 2), (7, 1), (9, 3)], [None, 0.0, 1.0]),
)
def test_rotate_and_write(dtype, num_tokens, head, heads, shift):
    num_heads, num_kv_heads = heads
    all_heads = random(dtype, num_tokens, num_heads + 2 * num_kv_heads, head)
    angles = random(torch.float32, num_tokens, 1, head // 2)
    norm = None if shift is None else HeadNorm(random(dtype, num_heads + num_kv_heads, head), 1e-6, shift)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(head))[:num_tokens]
    results = []
    for ops in (TorchOps(), TritonOps()):
        cache = torch.zeros(2, 3, num_kv_heads, 16, -(-head // 16) * 16, dtype=dtype)

        def write_kv(key, value, kv_cache):
            write_slots(key, value, kv_cache, slots // 16, slots % 16)

        plan = SimpleNamespace(slots_of=lambda kv_cache: slots, write_kv=write_kv)
        query = ops.rotate_and_write(all_heads.clone(), norm, (angles.cos(), angles.sin()), cache, plan)
        results.append((query, cache))
    (expected, expected_cache), (found, cache) = results
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(cache[0], expected_cache[0], **TOLERANCE[dtype])
    assert torch.equal(cache[1], expected_cache[1])


def test_a_token_without_a_slot_writes_nothing():
    heads, cache = random(torch.float32, 2, 4, 16), torch.zeros(2, 3, 1, 16, 16)
    plan = SimpleNamespace(slots_of=lambda kv_cache: torch.tensor([-1, 17]))
    TritonOps().rotate_and_write(heads, None, (torch.ones(2, 1, 8), torch.zeros(2, 1, 8)), cache, plan)
    assert cache.count_nonzero() == 2 * 16
    assert torch.equal(cache[:, 1, 0, 1], heads[1, 2:])


@dtypes
def test_keys_and_values_become_8_bit_floats(dtype):
    heads = 30 * random(dtype, 3, 4, 32)
    heads[0, 2, 0], heads[1, 3, 1] = 5000.0, -5000.0  # beyond the format's largest number
    angles, slots = random(torch.float32, 3, 1, 16), torch.tensor([17, 0, 40])
    norm = None
    caches = []
    for ops in (TorchOps(), TritonOps()):
        cache = torch.zeros(2, 3, 1, 16, 32, dtype=torch.float8_e4m3fn)

        def write_kv(key, value, kv_cache):
            write_slots(key, value, kv_cache, slots // 16, slots % 16)

        plan = SimpleNamespace(slots_of=lambda kv_cache: slots, write_kv=write_kv)
        ops.rotate_and_write(heads.clone(), norm, (angles.cos(), angles.sin()), cache, plan)
        caches.append(cache.float())
    torch.testing.assert_close(caches[1][0], caches[0][0], rtol=0.126, atol=2e-3)  # a step of the format
    assert torch.equal(caches[1][1], caches[0][1])
    assert caches[0].abs().max() == 448


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_that_are_not_finite(activation):
    gate_up = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    found = TritonOps().gate(gate_up, activation)
    assert not found.isfinite().any()
