"""The engine's ``Join`` stream: reports when a count changes, re-joins whenever the coordinator comes back."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import grpc.aio

from tokenloom.request.errors import Aborted, TokenloomError, Unavailable, of_exception
from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.services.runtime.peers.hello import check_hello
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from .identity import Identity
from .load import LoadTracker

log = logging.getLogger(__name__)

MIN_REPORT_SECONDS = 0.03
"""Between two reports. The coordinator counts its picks itself, at once: what it hears late is that requests ended."""
MAX_REPORT_SECONDS = 1.0
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0
HELLO_SECONDS = 5.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[coordinator_pb2.EngineReport, coordinator_pb2.EngineCommand]"


class CoordinatorLink:
    """Keeps the engine in the coordinator's registry for as long as :meth:`run` runs."""

    def __init__(
        self, channel: grpc.aio.Channel, identity: Identity, load: LoadTracker, role: types_pb2.EngineRole
    ) -> None:
        """``channel``: to the coordinator; closed with :meth:`run`."""
        self._channel = channel
        self._identity = identity
        self._load = load
        self._role = role
        self._is_outdated = False
        self._joined = asyncio.Event()
        self._state = coordinator_pb2.ENGINE_STATE_SERVING

    def set_role(self, role: types_pb2.EngineRole) -> None:
        """Tells the coordinator which legs the engine takes."""
        self._role = role
        self._load.changed.set()

    def set_state(self, state: coordinator_pb2.EngineState) -> None:
        """Tells the coordinator where the engine is in its life."""
        self._state = state
        self._load.changed.set()

    def rejoin(self) -> None:
        """The identity changed: joins anew with it."""
        self._is_outdated = True
        self._load.changed.set()

    async def wait_joined(self) -> None:
        """Returns once the coordinator knows the engine, and from then on at once: one that it has lost comes back."""
        await self._joined.wait()

    async def run(self, on_drain: Callable[[float], None]) -> None:
        """Joins, and joins again; returns only when a newer engine of this name has joined.

        ``on_drain`` gets the seconds of grace when the coordinator asks the engine to leave.
        """
        backoff = MIN_BACKOFF_SECONDS
        async with self._channel as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            while True:
                joined_at = time.monotonic()
                try:
                    await self._join(stub.Join(), on_drain)
                except (TokenloomError, grpc.aio.AioRpcError, TimeoutError) as cause:
                    error = of_exception(cause) if not isinstance(cause, TimeoutError) else Unavailable("no answer")
                if isinstance(error, Aborted):
                    log.error("left the coordinator's registry: %s", error.message)
                    return
                if time.monotonic() - joined_at > MAX_BACKOFF_SECONDS:
                    backoff = MIN_BACKOFF_SECONDS
                log.info("not in the coordinator's registry (%s), joining again", error.message)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)

    async def _join(self, call: _Call, on_drain: Callable[[float], None]) -> NoReturn:
        """One stream, until it fails."""
        self._is_outdated = False
        try:
            first = self._report()
            first.hello.CopyFrom(self._identity.hello())
            first.identity.CopyFrom(self._identity.registration())
            await _write(call, first)
            async with asyncio.timeout(HELLO_SECONDS):
                answer = await _read(call)
            check_hello(answer.hello)
            log.info("joined coordinator %s", answer.hello.peer_id)
            self._joined.set()
            await first_of(self._write_reports(call), _read_commands(call, on_drain))
        finally:
            call.cancel()  # leaving a stream does not end it
        raise AssertionError("neither task returns")

    async def _write_reports(self, call: _Call) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(MAX_REPORT_SECONDS):
                    await self._load.changed.wait()
            except TimeoutError:
                pass
            if self._is_outdated:
                raise Unavailable("the engine serves something else now")
            await _write(call, self._report())
            await asyncio.sleep(MIN_REPORT_SECONDS)  # what changes meanwhile goes as one

    def _report(self) -> coordinator_pb2.EngineReport:
        """One consistent view: a pick and the request that it placed are in the same report."""
        self._load.changed.clear()
        load = self._load.snapshot()
        is_held = self._load.is_paused and self._state == coordinator_pb2.ENGINE_STATE_SERVING
        return coordinator_pb2.EngineReport(
            role=self._role,
            state=coordinator_pb2.ENGINE_STATE_PAUSED if is_held else self._state,
            waiting=load.waiting,
            running=load.running,
            waiting_tokens=load.waiting_tokens,
            kv_usage=load.kv_usage,
            free_kv_blocks=load.free_kv_blocks,
            picks_arrived=self._load.take_picks(),
            step=load.step,
        )


async def _read_commands(call: _Call, on_drain: Callable[[float], None]) -> NoReturn:
    while True:
        command = await _read(call)
        if command.HasField("drain"):
            on_drain(command.drain.grace.ToNanoseconds() / 1e9)


async def _write(call: _Call, report: coordinator_pb2.EngineReport) -> None:
    """To a call that is over nothing is written; reading from it says why."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(report)


async def _read(call: _Call) -> coordinator_pb2.EngineCommand:
    message = await call.read()
    if not isinstance(message, coordinator_pb2.EngineCommand):
        raise Unavailable("the coordinator ended the stream")
    return message
