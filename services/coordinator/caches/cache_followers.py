"""Follows the prefix caches of the engines that publish their events."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import WatchKVEventsRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

from ..engines.engine_record import EngineRecord
from ..engines.engine_stream import to_duration
from ..prefixes.prefix_index import PrefixIndex
from .engine_cache import EngineCache

log = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
"""A call ends after so long, and the next one asks for the interval that suits the number of engines then."""
RETRY_SECONDS = 1.0
INTERVALS = 5
"""An engine sends changes of its cache at every fifth report at most: 1,000 messages a second from all engines."""
_MISSED = {grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT}
"""Batches that are wanted are no longer kept, or belong to another incarnation."""


class CacheFollowers:
    """Owns a task for each engine that is followed. One message of each is in memory at a time.

    Args:
        spawn: Starts a task and owns it: :meth:`.Host.spawn`.
        fall_backs: Where it is noted that the events of an engine are of no use; None: nowhere.
    """

    def __init__(
        self,
        prefixes: PrefixIndex,
        channels: Channels,
        spawn: Callable[..., "asyncio.Task[Any]"],
        fall_backs: FallBacks | None = None,
    ) -> None:
        self._prefixes = prefixes
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
        """Begin to follow, because prompts are placed by prefixes. ``report_interval``: see :mod:`.report_interval`."""
        is_first, self._interval = not self._interval, report_interval * INTERVALS
        if is_first:
            for record in self._joined.values():
                self._start(record)

    def _start(self, record: EngineRecord) -> None:
        identity = record.identity
        if identity.engine_id not in self._tasks:
            follow = self._follow(identity, EngineCache(self._prefixes, identity, record.row))
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
