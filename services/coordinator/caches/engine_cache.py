"""Applies the changes of one engine's prefix cache to the index of prefixes. No I/O."""

from collections.abc import Iterator

from tokenloom.request.prefix_schedule import specimen_hash
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import WatchKVEventsResponse

from ..prefixes.prefix_index import PrefixIndex

SLICE_BLOCKS = 1024
"""Blocks applied between two turns of the event loop: a few milliseconds."""


class EngineCache:
    """Follows one incarnation of an engine, which stays in its row of the index.

    Attributes:
        wanted: The batch that comes next; None: whatever comes next.
    """

    def __init__(self, prefixes: PrefixIndex, identity: EngineIdentity, row: int) -> None:
        self._prefixes = prefixes
        self._identity = identity
        self._row = row
        self.wanted: int | None = None

    def objection(self, first: WatchKVEventsResponse) -> str:
        """Return why the first response says that the others are of no use; empty: they are."""
        if first.engine_epoch != self._identity.epoch:
            return "another incarnation has its address"
        if first.prefix_changes.specimen_hash != specimen_hash(self._identity.fingerprint.block_size):
            return "it hashes blocks otherwise than tokenizers do"
        return ""

    def forget(self) -> None:
        """Drop all blocks, because changes were missed: picks and later changes teach them anew."""
        self._prefixes.open(self._row, self._identity.num_kv_blocks)
        self.wanted = None

    def take(self, response: WatchKVEventsResponse) -> Iterator[None]:
        """Apply a response. Yields after each slice of work; until the last one the response does not count as taken,
        and may be applied again."""
        changes = response.prefix_changes
        # After a gap an evicted block could stay in the index for ever. To know too little costs one computation of a
        # prompt; to know what is not there sends prompts to the wrong engine again and again.
        if self.wanted not in (None, changes.first_sequence):
            self.forget()
        if changes.all_cleared:
            self._prefixes.open(self._row, self._identity.num_kv_blocks)
        removed = list(changes.removed)
        for begin in range(0, len(removed), SLICE_BLOCKS):
            self._prefixes.remove(removed[begin : begin + SLICE_BLOCKS], self._row)
            yield
        num_stored = 0
        for chain in changes.stored:
            self._prefixes.store(chain.parent if chain.HasField("parent") else None, chain.blocks, self._row)
            num_stored += len(chain.blocks) + 1
            if num_stored >= SLICE_BLOCKS:
                num_stored = 0
                yield
        self.wanted = response.sequence + 1
