"""What the prefix cache holds, told as changes (names and fields as in vLLM's KV events)."""

from typing import Final

import msgspec

MEDIUM_POOL: Final = "GPU"
"""A medium is a tier, by vLLM's names: the pool that attention reads is ``GPU`` whatever the device, a CPU too, for
consumers take ``CPU`` and ``STORAGE`` for blocks that have to be loaded first."""


class BlockStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """Full blocks that can be hit from now on, in order: each follows the one before it."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before the first; None: it begins a prompt."""
    token_ids: list[int]
    """[len(block_hashes) * block_size]"""
    block_size: int
    medium: str
    """The tier that the blocks are in: ``MEDIUM_POOL``."""


class BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """Blocks that can be hit no more: their memory is given to others."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """No block can be hit any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """The changes since they were last taken; fulfils ``EvictionListener``.

    Bounded by what one step can change: they are taken after each.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.events: list[KVCacheEvent] = []
        """In the order in which they happened."""

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: list[int]) -> None:
        """A block; one that follows the last joins its event."""
        last = self.events[-1] if self.events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.token_ids += token_ids
        else:
            self.events.append(BlockStored([block_hash], parent, token_ids, self._block_size, MEDIUM_POOL))

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """See ``EvictionListener``."""
        last = self.events[-1] if self.events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self.events.append(BlockRemoved([block_hash], MEDIUM_POOL))

    def forgot_all(self) -> None:
        """See ``EvictionListener``. What changed before is of no interest any more."""
        self.events = [AllBlocksCleared()]

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events
