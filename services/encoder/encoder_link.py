"""Keeps the encoder in the coordinator's registry, so that gateways find it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import grpc.aio

from tokenloom.request.errors import Aborted, FailedPrecondition, Unavailable
from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.peers.hello import HELLO_SECONDS, check_hello, make_hello
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[coordinator_pb2.EngineReport, coordinator_pb2.EngineCommand]"


class EncoderLink:
    """Joins the coordinator, reports every second, and joins again after failures.

    Attributes:
        joined: Set when it has joined for the first time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: coordinator_pb2.EngineIdentity,
        supervisor: str,
        load: Callable[[], tuple[int, int]],
    ) -> None:
        """``supervisor``: as ``JoinFacts`` has it. ``load`` returns how many items wait, and how many are computed."""
        self._channel = channel
        self._identity = identity
        self._supervisor = supervisor
        self._load = load
        self._state = coordinator_pb2.ENGINE_STATE_SERVING
        self._changed = asyncio.Event()
        self._num_reports = 0
        self.joined = asyncio.Event()

    def drain(self) -> None:
        """Report from now on that the encoder drains."""
        self._state = coordinator_pb2.ENGINE_STATE_DRAINING
        self._changed.set()

    async def run(self, drain: Callable[[], None]) -> NoReturn:
        """Stay joined until cancelled. ``drain`` is called when the coordinator asks for it. Raises
        ``FailedPrecondition`` if another process has taken the encoder's name."""
        backoff, stub = MIN_BACKOFF_SECONDS, coordinator_pb2_grpc.CoordinatorStub(self._channel)
        reason, loop = "", asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._join(stub.Join(), drain)
            except Exception as failure:  # of any kind: it goes on serving meanwhile, and joins again
                error = of_exception(failure)
            if isinstance(error, Aborted):
                raise FailedPrecondition(f"removed from the coordinator's registry: {error.message}")
            if error.message != reason:  # not every second for as long as it lasts
                reason = error.message
                log.info("not in the coordinator's registry (%s); joining again until it succeeds", reason)
            if loop.time() - began > MAX_BACKOFF_SECONDS:
                backoff = MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _join(self, call: _Call, drain: Callable[[], None]) -> NoReturn:
        try:
            first = self._report()
            first.hello.CopyFrom(make_hello(self._identity.engine_id, self._identity.epoch))
            first.identity.CopyFrom(self._identity)
            first.join.supervisor = self._supervisor
            await _write(call, first)
            async with asyncio.timeout(HELLO_SECONDS):
                answer = await _read(call)
            check_hello(answer.hello)
            log.info("joined coordinator %s", answer.hello.peer_id)
            self.joined.set()
            await first_of(self._write_reports(call), _read_commands(call, drain))
        finally:
            call.cancel()  # gRPC does not end a stream that is merely dropped
        raise AssertionError("neither task returns")

    async def _write_reports(self, call: _Call) -> NoReturn:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            await _write(call, self._report())

    def _report(self) -> coordinator_pb2.EngineReport:
        waiting, running = self._load()
        self._num_reports += 1
        return coordinator_pb2.EngineReport(
            role=types_pb2.ENGINE_ROLE_ENCODE,
            state=self._state,
            waiting=waiting,
            running=running,
            step=self._num_reports,  # it has none: one large image may take longer than any step of an engine
        )


async def _read_commands(call: _Call, drain: Callable[[], None]) -> NoReturn:
    while True:
        if (await _read(call)).HasField("drain"):
            drain()


async def _write(call: _Call, report: coordinator_pb2.EngineReport) -> None:
    """Write a report, unless the call has ended; reading from the call then raises the reason."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(report)


async def _read(call: _Call) -> coordinator_pb2.EngineCommand:
    message = await call.read()
    if not isinstance(message, coordinator_pb2.EngineCommand):
        raise Unavailable("the coordinator ended the stream")
    return message
