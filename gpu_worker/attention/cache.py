"""Allocation of the paged KV cache and writing to it: the layout that every backend here shares."""

import torch
from torch import Tensor

from ..model_config import ModelConfig
from .interface import KVCache


def allocate_kv_caches(config: ModelConfig, num_blocks: int, block_size: int, device: torch.device) -> list[KVCache]:
    """One allocation for all layers. Zeroed, which costs nothing (fresh pages are zero) and keeps padding finite."""
    shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_size)
    return list(torch.zeros(shape, dtype=config.dtype, device=device).unbind())


def kv_layout(config: ModelConfig) -> str:
    """Order, dtype and shape of a block, for fingerprints: caches of equal strings can exchange blocks."""
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[config.dtype_name]
    return f"HND/{dtype}/{config.num_layers}x{config.num_kv_heads}x{config.head_size}"


def write_slots(key: Tensor, value: Tensor, kv_cache: KVCache, blocks: Tensor, offsets: Tensor) -> None:
    """Stores [T, num_kv_heads, head_size] keys and values at block ``blocks`` [T], position ``offsets`` [T] in it."""
    by_token = kv_cache.transpose(2, 3)
    by_token[0][blocks, offsets] = key
    by_token[1][blocks, offsets] = value
