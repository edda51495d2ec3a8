"""The cache's layout."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.cache import allocate_kv_caches, kv_layout, make_kv_pool, write_slots

CONFIG: Any = SimpleNamespace(
    num_layers=3,
    num_kv_heads=2,
    head_size=4,
    cache_head_size=4,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    kv_row_bytes=4 * 2,
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
