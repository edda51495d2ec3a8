"""Holds the size of an engine's KV cache."""

import msgspec

from .kv_groups import KVGroup


class KVCacheConfig(msgspec.Struct, frozen=True):
    """Holds the size of the paged KV cache, which is fixed at start-up."""

    num_blocks: int
    max_model_len: int
    """The limit for prompt and output together, in tokens, after it was fitted to the blocks."""
    groups: list[KVGroup] = []
    """The groups of layers, each with a table of its own; empty: all layers share one."""
    has_null_block: bool = False
    """Whether block ``NULL_BLOCK`` is kept free of requests although there are no groups: dummy batches write to it."""
