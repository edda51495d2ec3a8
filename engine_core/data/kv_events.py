"""Records changes of the prefix cache as events (names and fields as in vLLM's KV events)."""

from collections.abc import Sequence
from typing import Final

import msgspec

from tokenloom.request.prefix_schedule import last_named

MEDIUM_POOL: Final = "GPU"
"""The medium of an event names a tier as vLLM does. The pool that attention reads is ``GPU`` on any device, because
consumers understand ``CPU`` and ``STORAGE`` as blocks that must be loaded first."""


class BlockStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """Lists full blocks that can be hit from now on, in order: each follows the one before it in a prompt."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """The hash of the block before the first; None if the first begins a prompt."""
    token_ids: list[int]
    """[len(block_hashes) * block_size]"""
    block_size: int
    medium: str
    """The tier that holds the blocks: ``MEDIUM_POOL``."""
    num_blocks_before: int = 0
    """Blocks of the prompt before the first one."""
    named_block_before: bytes | None = None
    """The hash of the last of them that placement names (:mod:`tokenloom.request.prefix_schedule`), if one is."""


class BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """Lists blocks that can no longer be hit, because their memory is reused."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """Says that no block can be hit any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """Collects the changes since they were last taken. Implements ``EvictionListener``.

    The changes of one step bound its size, because they are taken after each step.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.events: list[KVCacheEvent] = []
        """In the order in which they happened."""

    def stored(self, hashes: Sequence[bytes], index: int, token_ids: list[int]) -> None:
        """Record that block ``index`` of a prompt can be hit. A block that follows the previous one joins its event.

        ``hashes``: of the prompt's blocks, at least up to this one. ``token_ids``: of this block.
        """
        last, parent = self.events[-1] if self.events else None, hashes[index - 1] if index else None
        # A prompt of n blocks becomes one event instead of n: subscribers pay for each event, and the coordinator
        # follows many engines.
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(hashes[index])
            last.token_ids += token_ids
        else:
            named = hashes[num_named - 1] if (num_named := last_named(index)) else None
            stored = BlockStored([hashes[index]], parent, token_ids, self._block_size, MEDIUM_POOL, index, named)
            self.events.append(stored)

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """Record a block that can no longer be hit."""
        self.forgot(block_hash)

    def forgot(self, block_hash: bytes) -> None:
        """Record content that can no longer be hit."""
        last = self.events[-1] if self.events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self.events.append(BlockRemoved([block_hash], MEDIUM_POOL))

    def forgot_all(self) -> None:
        """Record that no block can be hit. This replaces all earlier events."""
        # Events before it describe blocks that a subscriber is about to drop in any case.
        self.events = [AllBlocksCleared()]

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events
