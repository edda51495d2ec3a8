"""Computes how many KV blocks an engine has, and how long a request may be."""

from collections.abc import Callable

from ..data.config import EngineConfig
from ..data.kv_groups import KVCacheConfig, KVNeed
from ..data.model_info import ModelInfo
from .kv_cache_manager import largest_chunk


def size_kv_cache(config: EngineConfig, model: ModelInfo, available_memory: Callable[[], int]) -> KVCacheConfig:
    """Compute the number of blocks and the context length.

    ``available_memory`` does the worker's profile run and returns bytes; called only if no setting fixes the size.
    Raises ``ValueError``, naming the setting, if no request fits, or the longest one that is configured does not.
    """
    _check_settings(config, model)
    wanted = config.max_model_len or model.max_model_len
    num_blocks = _num_blocks(config, model, wanted, available_memory)
    # A rank without requests computes a dummy token so that its experts answer the other ranks. Block 0 takes that
    # token's KV; any other block may belong to a request.
    has_null_block = has_waves(config, model) and not model.kv_groups  # groups have one anyway
    capacity = _capacity(config, model, num_blocks - has_null_block) * config.cache.block_size
    if capacity < (config.max_model_len or 2):
        raise ValueError(
            f"the KV cache holds {capacity} tokens ({num_blocks} blocks of {config.cache.block_size}), fewer than "
            f"max_model_len {wanted}; increase its memory or lower max_model_len"
        )
    return KVCacheConfig(
        num_blocks=num_blocks,
        max_model_len=min(wanted, capacity),
        groups=model.kv_groups,
        has_null_block=has_null_block,
    )


def has_waves(config: EngineConfig, model: ModelInfo) -> bool:
    """Return whether the engine computes in waves with the other ranks of its data-parallel group."""
    return bool(config.parallel.group_id) and model.experts_per_token > 0


def _check_settings(config: EngineConfig, model: ModelInfo) -> None:
    if config.cache.block_size < 1:
        raise ValueError(f"block_size is {config.cache.block_size}; it must be at least 1")
    if config.max_model_len is not None and not 2 <= config.max_model_len <= model.max_model_len:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; it must be at least 2 (one token of prompt, one of output) and "
            f"at most the model's context of {model.max_model_len}"
        )


def _num_blocks(config: EngineConfig, model: ModelInfo, max_model_len: int, available_memory: Callable[[], int]) -> int:
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = model.block_bytes(cache.block_size)
    if cache.memory_bytes is not None:
        return cache.memory_bytes // block_bytes
    # More blocks than this could never be in use.
    num_blocks = -(-max_model_len // cache.block_size)
    # Without this bound a tiny model on a large host would take half of its memory for blocks that max_num_seqs full
    # contexts cannot fill.
    num_useful = config.scheduler.max_num_seqs * num_blocks
    if has_waves(config, model) and not model.kv_groups:
        num_useful += 1
    if model.kv_groups:
        num_useful = config.scheduler.max_num_seqs * _need(config, model).of_blocks(num_blocks) + 1
    return min(max(0, available_memory()) // block_bytes, num_useful)


def _capacity(config: EngineConfig, model: ModelInfo, num_blocks: int) -> int:
    """Return how many blocks of tokens one request may have."""
    return _need(config, model).capacity(num_blocks - 1) if model.kv_groups else num_blocks


def _need(config: EngineConfig, model: ModelInfo) -> KVNeed:
    lends = bool(config.kv.transports)
    return KVNeed(model.kv_groups, config.cache.block_size, largest_chunk(config.scheduler), lends=lends)
