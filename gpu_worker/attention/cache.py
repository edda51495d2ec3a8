"""Allocates the paged KV cache and writes to it; every backend here shares this layout."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion

from ..checkpoint.model_config import FP8_KV, ModelConfig
from .attention_backend import KVCache
from .fp8_cache import as_bytes, to_fp8
from .int8_cache import dequantize, write_int8_slots

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "int8+fp32",
    FP8_KV: "fp8-e4m3",
}


def allocate_kv_caches(
    config: ModelConfig, num_blocks: int, block_size: int, device: torch.device, memory: PoolMemory | None = None
) -> list[KVCache]:
    """Allocate the caches of all layers at once. They are zeroed, which costs nothing (fresh pages are zero).

    Zeros keep padding finite, and behind the elements of a head nothing else is ever written.

    Args:
        memory: Fresh memory of the host to lay them in; None: torch's own.
    """
    # Rows are whole 16s of elements, because the C++ kernels read whole vectors: a head of 100 takes 112. All backends
    # share the size, so that engines with different ones can exchange blocks.
    row_size = config.kv_row_bytes // config.kv_dtype.itemsize
    shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, row_size)
    if memory is None:
        return list(torch.zeros(shape, dtype=config.kv_dtype, device=device).unbind())
    nbytes = num_blocks * block_size * config.kv_bytes_per_token
    return list(torch.frombuffer(memory.buffer[:nbytes], dtype=config.kv_dtype).view(shape).unbind())


def make_kv_pool(config: ModelConfig, num_blocks: int, block_size: int, memory: PoolMemory, layout: str = "") -> KVPool:
    """Describe caches in ``memory`` to transports: for each layer the region of its keys, then of its values.

    ``layout``: the name of the layout; empty: that of :func:`kv_layout`.
    """
    block_bytes = config.kv_bytes_per_token * block_size // (2 * config.num_layers)
    regions = tuple(KVRegion(i * num_blocks * block_bytes, block_bytes) for i in range(2 * config.num_layers))
    return KVPool(memory, regions, num_blocks, layout or kv_layout(config, block_size))


def kv_layout(config: ModelConfig, block_size: int) -> str:
    """Name order, dtype (``int8+fp32``: numbers and scales), layers x heads x head size in the cache, and block size.

    Caches with equal names can exchange blocks.
    """
    dtype = _NAMES[config.kv_dtype]
    return f"HND/{dtype}/{config.num_layers}x{config.num_kv_heads}x{config.cache_head_size}/{block_size}"


def pointers(kv_cache: KVCache) -> tuple[int, int]:
    """Return the addresses of its keys and values; a tensor view of each would slow down a small model."""
    keys = kv_cache.data_ptr()
    return keys, keys + kv_cache.stride(0) * kv_cache.itemsize


def padded(heads: Tensor, size: int) -> Tensor:
    """Return [T, heads, size]: the heads with zeros behind their elements. Scores and values do not change by them."""
    missing = size - heads.shape[2]
    return F.pad(heads, (0, missing)) if missing else heads


def write_slots(key: Tensor, value: Tensor, kv_cache: KVCache, blocks: Tensor, offsets: Tensor) -> None:
    """Store [T, num_kv_heads, head_size] keys and values at block ``blocks`` [T], position ``offsets`` [T] in it."""
    if kv_cache.dtype == torch.int8:
        write_int8_slots(key, kv_cache[0], blocks, offsets)
        write_int8_slots(value, kv_cache[1], blocks, offsets)
        return
    if kv_cache.dtype == FP8_KV:
        key, value, kv_cache = as_bytes(to_fp8(key)), as_bytes(to_fp8(value)), as_bytes(kv_cache)
    by_token = kv_cache.transpose(2, 3)[..., : key.shape[2]]
    by_token[0][blocks, offsets] = key
    by_token[1][blocks, offsets] = value


def elements(blocks: Tensor) -> Tensor:
    """Return [..., block_size, cache_head_size] elements of blocks of a cache, in float32 if they have 8 bits."""
    if blocks.dtype == FP8_KV:
        return blocks.float()
    return dequantize(blocks) if blocks.dtype == torch.int8 else blocks
