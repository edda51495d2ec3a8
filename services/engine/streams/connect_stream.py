"""Serves ``Engine``: one ``Connect`` stream per peer, which reads Adds, stops and aborts; writes a frame per step,
within credit."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from random import Random
from typing import TypeAlias

import grpc.aio

from tokenloom.request.errors import DeadlineExceeded, TokenloomError
from tokenloom.services.runtime.streams.slotted_stream import ServerStream, receive_hello
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from ..core.core_link import CoreLink
from ..kv.kv_front import KVFront
from ..records.identity import Identity
from ..records.load import LoadTracker
from .attempts import Attempts
from .frame_builder import FrameBuilder, FramePace

log = logging.getLogger(__name__)

ADDS_PER_TURN = 16
"""So many requests of a message are added before the event loop serves those that run."""

Context: TypeAlias = "grpc.aio.ServicerContext[engine_pb2.EngineInput, engine_pb2.EngineFrame]"


class ConnectStream(ServerStream[engine_pb2.EngineInput, engine_pb2.EngineFrame]):
    """Serves a stream from the peer's Hello to its end. All its tasks end with :meth:`run`."""

    def __init__(
        self,
        stream_id: int,
        peer: types_pb2.Hello,
        limits: types_pb2.ModelLimits,
        core: CoreLink,
        load: LoadTracker,
        random: Random,
        kv: KVFront | None = None,
        *,
        frame_interval: float = 0.0,
    ) -> None:
        """``random`` draws leases and seeds. ``kv``: None if this engine moves no KV and computes every prompt.
        ``frame_interval``: as in :class:`FramePace`."""
        super().__init__()
        self._core = core
        self._load = load
        self._kv = kv
        self._builder = FrameBuilder(peer.max_message_bytes)
        owner, lease_seconds = (kv.owner, kv.lease_seconds) if kv is not None else (None, 0.0)
        self._attempts = Attempts(
            stream_id,
            limits,
            self._builder,
            self._changed.set,
            core.clock,
            random,
            kv_owner=owner,
            lease_seconds=lease_seconds,
        )
        self._pace = FramePace(frame_interval, self._changed.set, self._loop)

    async def run(
        self,
        first: engine_pb2.EngineInput,
        requests: AsyncIterator[engine_pb2.EngineInput],
        context: Context,
        hello: types_pb2.Hello,
    ) -> None:
        """Serve the stream to its end. ``first`` is the message with the peer's Hello. Raises what ended the stream,
        unless the peer half-closed it."""
        try:
            await self.serve(first, requests, context.write, engine_pb2.EngineFrame(hello=hello, step=self._load.step))
        finally:
            # No await here: this also runs when the stream was reset and the task is cancelled.
            self._core.end(self._attempts.drop_all())
            self._core.drop_leases(self._attempts.drop_leases())
            self._pace.close()

    @property
    def has_data(self) -> bool:
        return self._builder.has_data

    @property
    def is_idle(self) -> bool:
        return not self._attempts.live and not self._builder.has_data

    def fail_live(self, error: TokenloomError) -> None:
        """End all live attempts with ``error``; the stream continues."""
        for attempt in list(self._attempts.live.values()):
            self._fail(attempt.slot, error)

    def close(self, error: TokenloomError) -> None:
        """Fail all live attempts, send what credit allows, and end the stream with ``error``."""
        self.fail_live(error)
        super().close(error)

    # Input

    async def _receive(self, message: engine_pb2.EngineInput) -> None:
        """Process one message: add, then accept, then stop_at, then abort."""
        for count, add in enumerate(message.add, 1):
            await self._add(add)
            # A message may hold hundreds of requests. In one turn their checks would delay the frames of all that run.
            if not count % ADDS_PER_TURN:
                await asyncio.sleep(0)
        for accept in message.accept:
            await self._accept(accept)
        if message.stop_at or message.abort_slots:
            self._end(message)

    def _end(self, message: engine_pb2.EngineInput) -> None:
        ended = [self._attempts.stop_at(stop.slot, stop.num_tokens) for stop in message.stop_at]
        ended += [self._attempts.abort(slot) for slot in message.abort_slots]
        self._core.end(attempt for attempt in ended if attempt is not None)
        for slot in (*(stop.slot for stop in message.stop_at), *message.abort_slots):
            self._core.drop_leases(self._attempts.drop_lease(slot))
        self._changed.set()

    async def _add(self, add: engine_pb2.AddRequest) -> None:
        self._take_slot(add.slot)
        try:
            self._load.admit(add)
            attempt = self._attempts.open(add)
        except Exception as error:  # the edge: a bad request must not end the stream
            RequestLog(log, add.request_id, add.trace_headers).debug("refused: %s", error)
            self._attempts.refuse(add, error)
            self._changed.set()
            return
        if len(self._attempts.live) == 1:
            self._written_at = self._loop.time()  # beats are due from the first request on
        if add.HasField("timeout"):
            seconds = add.timeout.ToNanoseconds() / 1e9
            # Deadlines are kept here, so that the core needs no clock: a step is short compared with any deadline.
            attempt.deadline = self._loop.call_later(seconds, self._expire, add.slot)
        self._core.open(attempt, self._attempts)
        if add.HasField("kv_source") and self._kv is not None:
            self._kv.loads.begin(attempt, add.kv_source)
            return
        try:
            await self._core.hand_over(attempt)
        except TokenloomError as error:
            self._fail(add.slot, error)

    async def _accept(self, accept: engine_pb2.AcceptTokens) -> None:
        try:
            if (known := self._attempts.accept(accept)) is not None:
                await self._core.accept(known)
        except TokenloomError as error:
            self._fail(accept.slot, error)

    def _expire(self, slot: int) -> None:
        self._fail(slot, DeadlineExceeded("the request timed out"))

    def _fail(self, slot: int, error: TokenloomError) -> None:
        if (attempt := self._attempts.fail(slot, error)) is not None:
            self._core.end([attempt])
            self._changed.set()

    # Output

    def _next_frame(self) -> engine_pb2.EngineFrame | None:
        # A frame that is due holds all that waits. Before it is due, only what is urgent is sent.
        builder = self._builder
        if not builder.has_data:
            return None
        is_due = self._pace.is_due(urgent=self._half_closed or self._closing is not None)
        # Credit is taken last: taken for a frame that is not sent, it would be lost, and the stream would starve.
        if not (is_due or builder.is_urgent) or not self._credit.take():
            return None
        if not is_due:
            # First tokens and ends do not wait for the interval, but take only their own rows along. When they took all
            # rows, nearly every step of 64 streams made a frame: 77.7 µs of CPU a token instead of 67.2.
            return builder.take_urgent(self._load.step)
        self._pace.sent(len(self._attempts.live))
        return builder.take(self._load.step)

    def _beat(self) -> engine_pb2.EngineFrame:
        return engine_pb2.EngineFrame(step=self._load.step, paused=self._load.is_paused)


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Owns the streams of all peers."""

    def __init__(
        self,
        identity: Identity,
        core: CoreLink,
        load: LoadTracker,
        kv: KVFront | None,
        random: Random,
        *,
        frame_interval: float,
    ) -> None:
        """``kv``: None if the engine moves no KV. ``random`` draws leases and seeds. ``frame_interval``: as in
        :class:`FramePace`."""
        self._identity = identity
        self._core = core
        self._load = load
        self._kv = kv
        self._random = random
        self._frame_interval = frame_interval
        self._stream_ids = itertools.count(1)
        self._streams: dict[ConnectStream, asyncio.Event] = {}  # each event is set when the stream has ended

    async def Connect(  # type: ignore[override]  # a coroutine that writes to the context, not a generator
        self, request_iterator: AsyncIterator[engine_pb2.EngineInput], context: Context
    ) -> None:
        """Serve one stream; engine.proto has the contract."""
        hello = self._identity.hello()
        first = await receive_hello(request_iterator, hello)
        stream = ConnectStream(
            next(self._stream_ids),
            first.hello,
            self._identity.limits,
            self._core,
            self._load,
            self._random,
            self._kv,
            frame_interval=self._frame_interval,
        )
        ended = self._streams[stream] = asyncio.Event()
        try:
            await stream.run(first, request_iterator, context, hello)
        finally:
            del self._streams[stream]
            ended.set()

    def fail_live(self, error: TokenloomError) -> None:
        """End every live request with ``error``."""
        for stream in self._streams:
            stream.fail_live(error)

    async def idle(self) -> None:
        """Wait until every request is answered and the answers were sent."""
        while busy := [stream for stream in self._streams if not stream.is_idle]:
            await busy[0].wait_idle()

    async def close(self, error: TokenloomError, grace: float) -> None:
        """Fail all live requests and end all streams with ``error``; wait at most ``grace`` seconds for their ends."""
        ends = list(self._streams.values())
        for stream in self._streams:
            stream.close(error)
        try:
            async with asyncio.timeout(grace):
                for ended in ends:
                    await ended.wait()
        except TimeoutError:
            pass  # the peer does not read: its stream breaks when the server stops
