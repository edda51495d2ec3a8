"""Holds the size of an engine's KV cache."""

import msgspec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """Holds the size of the paged KV cache, which is fixed at start-up."""

    num_blocks: int
    max_model_len: int
    """The limit for prompt and output together, in tokens, after it was fitted to the blocks."""
