"""Chooses the KV cache manager of a model."""

from typing import TypeAlias

from ..data.config import CacheConfig, SchedulerConfig
from ..data.kv_cache_config import KVCacheConfig
from ..data.kv_events import KVEventLog
from .grouped_kv_cache_manager import GroupedKVCacheManager
from .kv_cache_manager import KVCacheManager

KVManager: TypeAlias = KVCacheManager | GroupedKVCacheManager


def make_kv_manager(
    kv_cache: KVCacheConfig, cache: CacheConfig, scheduler: SchedulerConfig, events: KVEventLog | None, *, lends: bool
) -> KVManager:
    """Return the manager of an empty pool. ``events`` records which blocks can be hit, if given. ``lends``: whether
    other engines may read blocks."""
    if not kv_cache.groups:
        return KVCacheManager(kv_cache.num_blocks, cache, events, has_null_block=kv_cache.has_null_block)
    return GroupedKVCacheManager(
        kv_cache.num_blocks, kv_cache.groups, cache, largest_chunk(scheduler), events, lends=lends
    )


def largest_chunk(scheduler: SchedulerConfig) -> int:
    """Return most tokens that one request computes in a step."""
    return scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
