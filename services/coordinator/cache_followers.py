"""Follows the prefix caches of the engines that publish their events. Applies the changes of each cache to the index of
prefixes."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.prefix_schedule import specimen_hash
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import WatchKVEventsRequest, WatchKVEventsResponse
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

from .engines.engine_record import EngineRecord
from .engines.engine_stream import to_duration
from .prefixes.prefix_index import PrefixIndex
from .prefixes.state_boundaries import StateBoundaries

log = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
"""A call ends after so long, and the next one asks for the interval that suits the number of engines then."""
RETRY_SECONDS = 1.0
INTERVALS = 5
"""An engine sends changes of its cache at every fifth report at most: 1,000 messages a second from all engines."""
_MISSED = {grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT}
"""Batches that are wanted are no longer kept, or belong to another incarnation."""


SLICE_BLOCKS = 1024
"""Blocks applied between two turns of the event loop: a few milliseconds."""


class EngineCache:
    """Follows one incarnation of an engine, which stays in its row of the index.

    Attributes:
        wanted: The batch that comes next; None: whatever comes next.
    """

    def __init__(self, prefixes: PrefixIndex, states: StateBoundaries, identity: EngineIdentity, row: int) -> None:
        self._prefixes = prefixes
        self._states = states
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
        self._states.forget(self._row)
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
            self._states.forget(self._row)
        self._states.remove(self._row, changes.states_removed)
        self._states.store(self._row, changes.states_stored)
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


class CacheFollowers:
    """Owns a task for each engine that is followed. One message of each is in memory at a time.

    Args:
        spawn: Starts a task and owns it: :meth:`.Host.spawn`.
        fall_backs: Where it is noted that the events of an engine are of no use; None: nowhere.
    """

    def __init__(
        self,
        prefixes: PrefixIndex,
        states: StateBoundaries,
        channels: Channels,
        spawn: Callable[..., "asyncio.Task[Any]"],
        fall_backs: FallBacks | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._states = states
        self._fall_backs = fall_backs or FallBacks()
        self._channels = channels
        self._spawn = spawn
        self._interval = 0.0
        self._joined: dict[str, EngineRecord] = {}
        self._tasks: dict[str, tuple[int, asyncio.Task[Any]]] = {}  # with the engine's incarnation

    @property
    def num_followed(self) -> int:
        """Engines that are followed now."""
        return sum(not task.done() for _, task in list(self._tasks.values()))  # a copy: a scrape runs in its own thread

    def join(self, record: EngineRecord) -> None:
        """Follow an engine that joined, if it publishes events, once :meth:`follow` was called."""
        identity = record.identity
        if self._tasks.get(identity.engine_id, (identity.epoch,))[0] != identity.epoch:
            self.leave(identity.engine_id)
        if identity.publishes_kv_events:
            self._joined[identity.engine_id] = record
            if self._interval:
                self._start(record)

    def leave(self, engine_id: str) -> None:
        """Follow an engine no more."""
        self._joined.pop(engine_id, None)
        if (running := self._tasks.pop(engine_id, None)) is not None:
            running[1].cancel()

    def follow(self, report_interval: float) -> None:
        """Begin to follow, because prompts are placed by prefixes. ``report_interval``: seconds between two reports."""
        is_first, self._interval = not self._interval, report_interval * INTERVALS
        if is_first:
            for record in self._joined.values():
                self._start(record)

    def _start(self, record: EngineRecord) -> None:
        identity = record.identity
        if identity.engine_id not in self._tasks:
            follow = self._follow(identity, EngineCache(self._prefixes, self._states, identity, record.row))
            task = self._spawn(follow, name=f"cache of {identity.engine_id}")
            self._tasks[identity.engine_id] = identity.epoch, task

    async def _follow(self, identity: EngineIdentity, cache: EngineCache) -> None:
        """Follow an engine until cancelled, or until it turns out that its events are of no use."""
        async with self._channels.open(identity.address, "engine") as channel:
            stub = EngineAdminStub(channel)
            while True:
                try:
                    async with asyncio.timeout(RENEW_SECONDS):
                        await self._read(stub, cache)
                except TimeoutError:
                    continue
                except grpc.aio.AioRpcError as error:
                    if error.code() in _MISSED:
                        cache.forget()
                    log.debug("cache of %s: %s %s", identity.engine_id, error.code().name, error.details())
                except _OfNoUse as reason:
                    # It is not asked again: an engine that hashes otherwise does so for life, and its next incarnation
                    # joins anew.
                    self._fall_backs.begin("unfollowed_cache", str(reason), identity.engine_id)
                    return
                except Exception:  # of messages that cannot be: one faulty engine must not end the coordinator
                    log.exception("the KV events of engine %s are not followed any more", identity.engine_id)
                    self._fall_backs.begin("unfollowed_cache", "they cannot be understood", identity.engine_id)
                    cache.forget()
                    return
                await asyncio.sleep(RETRY_SECONDS)

    async def _read(self, stub: Any, cache: EngineCache) -> None:
        """Apply one call's responses."""
        request = WatchKVEventsRequest(from_sequence=cache.wanted, prefix_interval=to_duration(self._interval))
        call, is_first = stub.WatchKVEvents(request), True
        try:
            async for response in call:
                if is_first and (reason := cache.objection(response)):
                    raise _OfNoUse(reason)
                is_first = False
                # A first response may hold all blocks of a cache. Applied in one go, it would keep picks waiting.
                for _ in cache.take(response):
                    await asyncio.sleep(0)
        finally:
            call.cancel()


class _OfNoUse(Exception):
    """The engine's events say nothing about the prompts that are placed there."""
