"""Records changes of the prefix cache as events (names and fields as in vLLM's KV events)."""

import struct
from collections import Counter
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
    token_ids: bytearray
    """[len(block_hashes) * block_size] as little-endian 32-bit numbers: as integers they would be made again on each
    way, and few subscribers read them."""
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


class StateStored(msgspec.Struct, array_like=True, tag="StateStored", gc=False):
    """Says that the states of layers are kept after some blocks of a prompt, so that prompts can begin there."""

    named_block: bytes
    """The hash of the last of these blocks that placement names (:mod:`tokenloom.request.prefix_schedule`)."""


class StateRemoved(msgspec.Struct, array_like=True, tag="StateRemoved", gc=False):
    """Says that no state is kept any more of which this is the named block."""

    named_block: bytes
    """As in :class:`StateStored`."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared | StateStored | StateRemoved


def listed_ids(packed: bytearray) -> list[int]:
    """Return the token ids of stored blocks as integers."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


class KVEventLog:
    """Collects the changes since they were last taken. Implements ``EvictionListener``.

    The changes of one step bound its size, because they are taken after each step.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack
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
            last.token_ids += self._pack(*token_ids)
        else:
            named = hashes[num_named - 1] if (num_named := last_named(index)) else None
            packed = bytearray(self._pack(*token_ids))
            stored = BlockStored([hashes[index]], parent, packed, self._block_size, MEDIUM_POOL, index, named)
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


class StateEvents:
    """Records which states are kept, in the log of the blocks. Implements ``EvictionListener`` for their slots.

    Several states may have one named block; it is reported with the first of them, and removed with the last.
    """

    def __init__(self, log: KVEventLog) -> None:
        self._log = log
        self._named: dict[bytes, bytes] = {}  # by the hash of the last block; bounded by the slots
        self._counts: Counter[bytes] = Counter()

    def stored(self, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Record that the state after ``num_blocks`` blocks is kept. ``hashes``: of these blocks, at least."""
        if num_named := last_named(num_blocks):
            named = self._named[hashes[num_blocks - 1]] = hashes[num_named - 1]
            self._counts[named] += 1
            if self._counts[named] == 1:
                self._log.events.append(StateStored(named))

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """Record a state whose slot is used again."""
        self.forgot(block_hash)

    def forgot(self, block_hash: bytes) -> None:
        """Record a state that can no longer be hit."""
        if (named := self._named.pop(block_hash, None)) is not None:
            self._counts[named] -= 1
            if not self._counts[named]:
                del self._counts[named]
                self._log.events.append(StateRemoved(named))

    def forgot_all(self) -> None:
        """Forget all states; the log says so of all blocks."""
        self._named.clear()
        self._counts.clear()
