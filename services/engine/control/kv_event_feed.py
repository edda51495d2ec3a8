"""Keeps the latest events of the prefix cache, so that subscribers that were away for a short time miss none."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from tokenloom.engine_core.kv_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from tokenloom.request.errors import Aborted, InvalidArgument
from tokenloom.v1 import engine_pb2

REPLAY_BATCHES = 10_000
"""Number of steps whose events are kept, as in vLLM's publisher: minutes, and some megabytes."""


class KVEventFeed:
    """Buffers events once for all subscribers. Each reads at its own position, so a slow one costs no memory."""

    def __init__(self, engine_epoch: int, capacity: int = REPLAY_BATCHES) -> None:
        self._epoch = engine_epoch
        self._batches: deque[engine_pb2.WatchKVEventsResponse] = deque(maxlen=capacity)
        self._next = 1
        self._news = asyncio.Event()

    def publish(self, events: Iterable[KVCacheEvent]) -> None:
        """Append the events of one step as the next batch."""
        batch = engine_pb2.WatchKVEventsResponse(
            sequence=self._next, engine_epoch=self._epoch, events=[_to_proto(event) for event in events]
        )
        batch.time.GetCurrentTime()
        self._batches.append(batch)
        self._next += 1
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, sequence: int | None) -> AsyncIterator[engine_pb2.WatchKVEventsResponse]:
        """Yield batches from number ``sequence`` on, or from now on, without end.

        Raises ``InvalidArgument`` for a number that is still to come, ``Aborted`` for batches that are no longer kept.
        """
        if sequence is not None and not 1 <= sequence <= self._next:
            raise InvalidArgument(f"from_sequence must be 1 to {self._next}, not {sequence}", "from_sequence")
        wanted = sequence or self._next
        while True:
            while wanted < self._next:
                oldest = self._next - len(self._batches)
                if wanted < oldest:
                    raise Aborted(f"batches {wanted} to {oldest - 1} were dropped; the oldest kept batch is {oldest}")
                yield self._batches[wanted - oldest]
                wanted += 1
            await self._news.wait()


def _to_proto(event: KVCacheEvent) -> engine_pb2.KVCacheEvent:
    match event:
        case BlockStored():
            stored = engine_pb2.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                medium=event.medium,
            )
            return engine_pb2.KVCacheEvent(block_stored=stored)
        case BlockRemoved():
            removed = engine_pb2.BlockRemoved(block_hashes=event.block_hashes, medium=event.medium)
            return engine_pb2.KVCacheEvent(block_removed=removed)
        case AllBlocksCleared():
            return engine_pb2.KVCacheEvent(all_blocks_cleared=engine_pb2.AllBlocksCleared())
