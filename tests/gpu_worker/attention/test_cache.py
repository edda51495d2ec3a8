"""The cache's layout, and what is rounded to 8 bits."""

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu_worker.attention.steps import BLOCK_SIZE, CPU, make_step, shape
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.cache import (
    allocate_kv_caches,
    elements,
    kv_layout,
    make_kv_pool,
    numbers_of,
    quantize,
    scales_of,
    write_slots,
)
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.ops.ops import HeadNorm
from tokenloom.gpu_worker.ops.torch_ops import TorchOps

CONFIG: Any = SimpleNamespace(
    num_layers=3,
    num_kv_heads=2,
    head_size=4,
    cache_head_size=4,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    kv_row_bytes=4 * 2,
    kv_planes=2,
    latent=None,
    kv_shapes=(),
    states=None,
    cross_rows=0,
    scales_kv=False,
    kv_bytes_per_token=2 * 3 * 2 * 4 * 2,
)


def test_caches_are_zeroed_and_of_one_allocation() -> None:
    caches = allocate_kv_caches(CONFIG, num_blocks=5, block_size=8, device=torch.device("cpu"))
    assert [cache.shape for cache in caches] == [(2, 5, 2, 8, 4)] * 3
    assert all(cache.is_contiguous() and not cache.any() for cache in caches)
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1


def test_a_pool_shows_each_block_of_caches_laid_in_given_memory() -> None:
    memory = PoolMemory.allocate(5 * 8 * CONFIG.kv_bytes_per_token, shared=False)
    caches = allocate_kv_caches(CONFIG, 5, 8, torch.device("cpu"), memory)
    assert [cache.shape for cache in caches] == [(2, 5, 2, 8, 4)] * 3
    assert not any(cache.any() for cache in caches)
    for layer, cache in enumerate(caches):
        cache[0], cache[1] = layer + 1, -layer - 1
        cache[:, 3] *= 16
    pool = make_kv_pool(CONFIG, 5, 8, memory)
    assert pool.layout == kv_layout(CONFIG, 8)
    assert pool.block_bytes == 8 * CONFIG.kv_bytes_per_token
    for region, view in enumerate(pool.views):
        expected = caches[region // 2][region % 2]
        assert np.array_equal(view, expected.contiguous().view(torch.uint8).reshape(5, -1).numpy())


def test_write_touches_only_its_slots() -> None:
    cache = torch.zeros(2, 5, 2, 8, 4)
    key, value = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    blocks, offsets = torch.tensor([4, 0, 4]), torch.tensor([7, 3, 0])
    write_slots(key, value, cache, blocks, offsets)
    for token in range(3):
        assert torch.equal(cache[0, blocks[token], :, offsets[token]], key[token])
        assert torch.equal(cache[1, blocks[token], :, offsets[token]], value[token])
    assert cache.count_nonzero() == 2 * 3 * 2 * 4


def test_write_leaves_zeros_behind_a_head() -> None:
    cache = torch.zeros(2, 1, 2, 8, 16)
    key, value = torch.ones(2, 3, 2, 4)
    write_slots(key, value, cache, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert torch.equal(cache[:, 0, :, :3, :4], torch.ones(2, 2, 3, 4))
    assert cache.count_nonzero() == 2 * 3 * 2 * 4


def test_layout_names_order_dtype_and_shape() -> None:
    assert kv_layout(CONFIG, 8) == "HND/bf16/3x2x4/8"


BACKENDS = ["torch", "reference", *(["cpu"] if shutil.which("g++") else [])]
NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


def shaped(**entries: Any) -> Any:
    return shape(**{"num_kv_heads": 2, "kv_dtype": torch.int8, **entries})


def test_an_element_is_off_by_half_a_step_at_most() -> None:
    rows = torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-20, 20, 50)[:, None, None]
    numbers, scales = quantize(rows)
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (50, 3))
    error = (numbers * scales[..., None] - rows).abs()
    assert (error <= 0.5001 * scales[..., None]).all()
    assert (numbers.abs().amax(-1) == 127).all()


def test_ties_round_to_even_and_zeros_stay() -> None:
    numbers, scales = quantize(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, -0.0, 0.0]]))
    assert numbers.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scales.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_read_as_nan(value: float) -> None:
    rows = torch.ones(2, 16)
    rows[1, 3] = value
    assert quantize(rows)[1].isnan().tolist() == [False, True]


def test_a_token_takes_its_numbers_and_four_bytes_in_each_head() -> None:
    config = shaped(head_size=20)
    assert config.kv_bytes_per_token == 2 * 2 * (32 + 4)
    (cache,) = allocate_kv_caches(config, 5, 8, CPU, PoolMemory.allocate(5 * 8 * config.kv_bytes_per_token, False))
    assert (cache.shape, cache.dtype) == ((2, 5, 2, 8, 36), torch.int8)
    assert numbers_of(cache).shape == (2, 5, 2, 8, 32)
    assert scales_of(cache).shape == (2, 5, 2, 8)
    assert kv_layout(config, 8) == "HND/int8+fp32/1x2x32/8"
    pool = make_kv_pool(config, 5, 8, PoolMemory.allocate(5 * 8 * config.kv_bytes_per_token, False))
    assert pool.block_bytes == 8 * config.kv_bytes_per_token


def test_numbers_lie_before_the_scales_of_their_block() -> None:
    cache = torch.zeros(2, 3, 2, 8, 16 + 4, dtype=torch.int8)
    key = torch.full((1, 2, 16), 127.0)
    write_slots(key, -2 * key, cache, torch.tensor([1]), torch.tensor([5]))
    block = cache[0, 1, 0].flatten()
    assert block[: 8 * 16].nonzero().flatten().tolist() == list(range(5 * 16, 6 * 16))
    assert block[8 * 16 :].view(torch.float32).tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert torch.equal(elements(cache)[1, 1, :, 5], torch.full((2, 16), -254.0))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 20])
def test_every_backend_writes_the_same_bytes(name: str, dtype: torch.dtype, head_size: int) -> None:
    config = shaped(dtype=dtype, head_size=head_size)
    step = make_step([1, 40, 7], [5, 60, 7], 4, config)
    step.key[3], step.key[5, 1, 2], step.value[9] = 0, float("nan"), float("inf")
    step.key[7, 0], step.value[7, 1] = 1e-43, 3e38
    expected, cache = step.cache.clone(), step.cache.clone()
    slots = torch.from_numpy(step.arrays["slot_mapping"]).long()
    write_slots(step.key, step.value, expected, slots // BLOCK_SIZE, slots % BLOCK_SIZE)
    make_attention_backend(name, config, BLOCK_SIZE, CPU).plan(**step.arrays).write_kv(step.key, step.value, cache)
    finite = scales_of(expected).isfinite()
    assert torch.equal(scales_of(cache).isnan(), ~finite)
    assert torch.equal(scales_of(cache)[finite], scales_of(expected)[finite])
    assert torch.equal(numbers_of(cache)[finite], numbers_of(expected)[finite])


@pytest.mark.parametrize("name", BACKENDS)
def test_bytes_depend_on_no_other_token(name: str) -> None:
    """A block that fills token by token, the last one being the largest, equals one that is written at once."""
    config = shaped()
    at_once = make_step([20], [20], 4, config)
    at_once.key[-1] *= 1000
    backend = make_attention_backend(name, config, BLOCK_SIZE, CPU)
    expected, cache = torch.zeros_like(at_once.cache), torch.zeros_like(at_once.cache)
    backend.plan(**at_once.arrays).write_kv(at_once.key, at_once.value, expected)
    for token in range(20):
        arrays = make_step([1], [token + 1], 4, config).arrays
        arrays["block_tables"] = at_once.arrays["block_tables"]
        arrays["slot_mapping"] = at_once.arrays["slot_mapping"][token : token + 1]
        rows = slice(token, token + 1)
        backend.plan(**arrays).write_kv(at_once.key[rows], at_once.value[rows], cache)
    assert torch.equal(cache, expected)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 24])
def test_the_fused_operation_writes_what_pytorch_s_does(dtype: torch.dtype, head_size: int) -> None:
    heads = torch.randn(37, 4 + 2 * 2, head_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    angles = torch.rand(37, 1, head_size // 2)
    norm = HeadNorm(torch.rand(6, head_size).to(dtype), 1e-6, 0.0)
    slots = torch.randperm(4 * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:37]
    caches: list[Tensor] = []
    for ops in (TorchOps(), CPUOps()):
        cache = torch.zeros(2, 4, 2, BLOCK_SIZE, 32 + 4, dtype=torch.int8)

        def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
            write_slots(key, value, kv_cache, slots // BLOCK_SIZE, slots % BLOCK_SIZE)

        plan: Any = SimpleNamespace(slots_of=lambda _: slots, write_kv=write_kv)
        ops.rotate_and_write(heads.clone(), norm, (angles.cos(), angles.sin()), cache, plan)
        caches.append(cache)
    expected, found = caches
    assert torch.equal(found[1], expected[1])
    largest_step = float(scales_of(expected).max())
    torch.testing.assert_close(elements(found), elements(expected), rtol=2e-2, atol=1.01 * largest_step)
