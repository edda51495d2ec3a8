"""Keeps the latest events of the prefix cache, so that subscribers that were away for a short time miss none.

For placement they are merged into what they changed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice

from google.protobuf.timestamp_pb2 import Timestamp

from tokenloom.engine_core.data.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    StateRemoved,
    StateStored,
    listed_ids,
)
from tokenloom.request.errors import Aborted, InvalidArgument
from tokenloom.request.prefix_schedule import named_within
from tokenloom.v1 import engine_pb2
from tokenloom.v1.engine_pb2 import PrefixChain, PrefixChanges, WatchKVEventsResponse

REPLAY_BATCHES = 10_000
"""Number of steps whose events are kept, as in vLLM's publisher: minutes, and some megabytes."""
MERGED_BATCHES = 256
"""Covered by one response at most, so that merging them takes a few milliseconds."""


class KVEventFeed:
    """Buffers events once for all subscribers. Each reads at its own position, so a slow one costs no memory."""

    def __init__(self, engine_epoch: int, capacity: int = REPLAY_BATCHES) -> None:
        self._epoch = engine_epoch
        self._batches: deque[engine_pb2.WatchKVEventsResponse] = deque(maxlen=capacity)
        self._token_ids: deque[list[bytearray]] = deque(maxlen=capacity)  # of the stored blocks of each batch
        self._next = 1
        self._news = asyncio.Event()
        self.outlet: Callable[[Sequence[KVCacheEvent]], None] | None = None
        """Publishes the events of a step to routers of others; None: they get none."""

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Append the events of one step as the next batch."""
        if self.outlet is not None:
            self.outlet(events)
        self._batches.append(
            engine_pb2.WatchKVEventsResponse(
                sequence=self._next, engine_epoch=self._epoch, time=_now(), events=map(_to_proto, events)
            )
        )
        self._token_ids.append([event.token_ids for event in events if isinstance(event, BlockStored)])
        self._next += 1
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, sequence: int | None) -> AsyncIterator[engine_pb2.WatchKVEventsResponse]:
        """Yield batches from number ``sequence`` on, or from now on, without end.

        Raises ``InvalidArgument`` for a number that is still to come, ``Aborted`` for batches that are no longer kept.
        """
        wanted = self._first(sequence)
        while True:
            while wanted < self._next:
                yield self._with_ids(self._index_of(wanted))
                wanted += 1
            await self._news.wait()

    async def follow_prefixes(
        self, sequence: int | None, interval: float, specimen_hash: bytes
    ) -> AsyncIterator[engine_pb2.WatchKVEventsResponse]:
        """Yield what batches from number ``sequence`` on, or from now on, changed for the placement of prompts: those
        of ``interval`` seconds in one response. The first response has ``specimen_hash`` and no changes.

        Raises as :meth:`follow`.
        """
        wanted = self._first(sequence)
        first = engine_pb2.PrefixChanges(first_sequence=wanted, specimen_hash=specimen_hash)
        yield engine_pb2.WatchKVEventsResponse(
            sequence=wanted - 1, engine_epoch=self._epoch, time=_now(), prefix_changes=first
        )
        while True:
            while wanted < self._next:
                begin = self._index_of(wanted)
                batches = list(islice(self._batches, begin, begin + MERGED_BATCHES))
                changes = merged(batches)
                changes.first_sequence, wanted = wanted, wanted + len(batches)
                yield engine_pb2.WatchKVEventsResponse(
                    sequence=wanted - 1, engine_epoch=self._epoch, time=batches[-1].time, prefix_changes=changes
                )
            await self._news.wait()
            await asyncio.sleep(interval)

    def _with_ids(self, index: int) -> WatchKVEventsResponse:
        """Return a batch with the ids of its tokens, which become integers for those who follow all events."""
        if not (token_ids := self._token_ids[index]):
            return self._batches[index]
        batch = WatchKVEventsResponse()
        batch.CopyFrom(self._batches[index])
        stored = (event.block_stored for event in batch.events if event.HasField("block_stored"))
        for packed, event in zip(token_ids, stored, strict=True):
            event.token_ids.extend(listed_ids(packed))
        return batch

    def _first(self, sequence: int | None) -> int:
        """Return the first batch that a reader gets. Raises ``InvalidArgument``."""
        if sequence is not None and not 1 <= sequence <= self._next:
            raise InvalidArgument(f"from_sequence must be 1 to {self._next}, not {sequence}", "from_sequence")
        return sequence or self._next

    def _index_of(self, sequence: int) -> int:
        """Return where a batch is kept. Raises ``Aborted`` if it no longer is."""
        oldest = self._next - len(self._batches)
        if sequence < oldest:
            raise Aborted(f"batches {sequence} to {oldest - 1} were dropped; the oldest kept batch is {oldest}")
        return sequence - oldest


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    return now


def _to_proto(event: KVCacheEvent) -> engine_pb2.KVCacheEvent:
    """Return an event without the ids of its tokens: placement needs their hashes only."""
    match event:
        case BlockStored():
            stored = engine_pb2.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                block_size=event.block_size,
                medium=event.medium,
                num_blocks_before=event.num_blocks_before,
                named_block_before=event.named_block_before,
            )
            return engine_pb2.KVCacheEvent(block_stored=stored)
        case BlockRemoved():
            removed = engine_pb2.BlockRemoved(block_hashes=event.block_hashes, medium=event.medium)
            return engine_pb2.KVCacheEvent(block_removed=removed)
        case AllBlocksCleared():
            return engine_pb2.KVCacheEvent(all_blocks_cleared=engine_pb2.AllBlocksCleared())
        case StateStored():
            return engine_pb2.KVCacheEvent(state_stored=engine_pb2.StateStored(named_block=event.named_block))
        case StateRemoved():
            return engine_pb2.KVCacheEvent(state_removed=engine_pb2.StateRemoved(named_block=event.named_block))


_HASH_BYTES = 8


def merged(batches: Iterable[WatchKVEventsResponse]) -> PrefixChanges:
    """Return what consecutive batches changed; the caller fills in which batches they are.

    Of a block that came and went several times, the last time counts.
    """
    all_cleared = False
    removed: dict[int, None] = {}
    stored: dict[int, int | None] = {}  # with the named block before
    states: dict[int, bool] = {}  # whether they are kept
    for batch in batches:
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "block_stored":
                for block, parent in _named(event.block_stored):
                    stored[block] = parent
            elif kind == "block_removed":
                for block_hash in event.block_removed.block_hashes:
                    block = _named_as(block_hash)
                    stored.pop(block, None)
                    removed[block] = None
            elif kind == "state_stored":
                states[_named_as(event.state_stored.named_block)] = True
            elif kind == "state_removed":
                states[_named_as(event.state_removed.named_block)] = False
            else:
                all_cleared = True
                removed.clear()
                stored.clear()
                states.clear()
    gone = [block for block in removed if block not in stored]
    return PrefixChanges(
        all_cleared=all_cleared,
        removed=gone,
        stored=_chains(stored),
        states_removed=[block for block, is_kept in states.items() if not is_kept],
        states_stored=[block for block, is_kept in states.items() if is_kept],
    )


def _named(event: engine_pb2.BlockStored) -> Iterable[tuple[int, int | None]]:
    """Yield the blocks that prompts name, and of each the named one before it."""
    before, hashes = event.num_blocks_before, event.block_hashes
    parent = _named_as(event.named_block_before) if event.HasField("named_block_before") else None
    for num_blocks in named_within(before, len(hashes)):
        block = _named_as(hashes[num_blocks - 1 - before])
        yield block, parent
        parent = block


def _chains(stored: dict[int, int | None]) -> list[PrefixChain]:
    chains: list[PrefixChain] = []
    last: int | None = None
    for block, parent in stored.items():
        if parent is None or parent != last:
            chains.append(PrefixChain(parent=parent))
        chains[-1].blocks.append(block)
        last = block
    return chains


def _named_as(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_HASH_BYTES], "little")
