"""The prefix cache's events, for whoever subscribes: kept a while, so that a short absence costs nothing."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from tokenloom.engine_core.kv_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from tokenloom.request.errors import Aborted, InvalidArgument
from tokenloom.v1 import engine_pb2

REPLAY_BATCHES = 10_000
"""Steps with events that are kept (as many as vLLM's publisher keeps): minutes, and some megabytes."""


class KVEventFeed:
    """One buffer for all subscribers: each reads at its own place in it, so a slow one costs no memory."""

    def __init__(self, engine_epoch: int, capacity: int = REPLAY_BATCHES) -> None:
        self._epoch = engine_epoch
        self._batches: deque[engine_pb2.WatchKVEventsResponse] = deque(maxlen=capacity)
        self._next = 1
        self._news = asyncio.Event()

    def publish(self, events: Iterable[KVCacheEvent]) -> None:
        """One step's events become the next batch."""
        batch = engine_pb2.WatchKVEventsResponse(
            sequence=self._next, engine_epoch=self._epoch, events=[_to_proto(event) for event in events]
        )
        batch.time.GetCurrentTime()
        self._batches.append(batch)
        self._next += 1
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, sequence: int | None) -> AsyncIterator[engine_pb2.WatchKVEventsResponse]:
        """From batch ``sequence`` on, or from now on, for ever.

        Raises ``InvalidArgument`` for a batch that is yet to come, ``Aborted`` naming those that were not kept.
        """
        if sequence is not None and not 1 <= sequence <= self._next:
            raise InvalidArgument(f"from_sequence is {sequence}; the next batch is {self._next}", "from_sequence")
        wanted = sequence or self._next
        while True:
            while wanted < self._next:
                oldest = self._next - len(self._batches)
                if wanted < oldest:
                    raise Aborted(f"batches {wanted} to {oldest - 1} are gone; the oldest that is kept is {oldest}")
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
