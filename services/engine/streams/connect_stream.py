"""One peer's ``Connect`` stream: reads Adds, stops and aborts; writes at most one frame a step, as credit allows."""

import asyncio
import heapq
import logging
import time
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio

from tokenloom.request.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.services.runtime.host.task_group import task_group
from tokenloom.services.runtime.peers.credit import Credit
from tokenloom.services.runtime.peers.hello import HEARTBEAT_SECONDS
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.v1 import engine_pb2, types_pb2

from ..core.core_link import CoreLink
from ..kv.kv_front import KVFront
from .attempts import Attempts
from .engine_admission import Admission
from .frame_builder import FrameBuilder
from .frame_pace import FramePace

log = logging.getLogger(__name__)

STARVED_SECONDS = 5.0
"""A peer that grants nothing for so long while data waits is lost; its stream ends."""

Context: TypeAlias = "grpc.aio.ServicerContext[engine_pb2.EngineInput, engine_pb2.EngineFrame]"


class ConnectStream:
    """Lives from the peer's Hello to the end of the stream. All its tasks end with :meth:`run`."""

    def __init__(
        self,
        stream_id: int,
        peer: types_pb2.Hello,
        limits: types_pb2.ModelLimits,
        core: CoreLink,
        admission: Admission,
        kv: KVFront | None = None,
        *,
        frame_interval: float = 0.0,
    ) -> None:
        """``kv``: None when this engine moves no KV; what is held elsewhere is then computed here;
        ``frame_interval``: as in :class:`FramePace`."""
        self._core = core
        self._admission = admission
        self._kv = kv
        self._builder = FrameBuilder(peer.max_message_bytes)
        owner, lease_seconds = (kv.owner, kv.lease_seconds) if kv is not None else (None, 0.0)
        self._attempts = Attempts(stream_id, limits, self._builder, kv_owner=owner, lease_seconds=lease_seconds)
        self._credit = Credit(peer.initial_credit)
        self._changed = asyncio.Event()  # something to write, a grant, an end
        self._pace = FramePace(frame_interval, self._changed.set, asyncio.get_running_loop())
        self._idle = asyncio.Event()
        self._half_closed = False
        self._closing: TokenloomError | None = None
        self._deadlines: list[tuple[float, int]] = []  # (monotonic seconds, slot)
        self._deadline_added = asyncio.Event()
        self._written_at = time.monotonic()
        self._starved_since: float | None = None

    async def run(
        self,
        first: engine_pb2.EngineInput,
        requests: AsyncIterator[engine_pb2.EngineInput],
        context: Context,
        hello: types_pb2.Hello,
    ) -> None:
        """Serves the stream to its end, ``first`` being what came with the peer's Hello. Raises what ended it, if that
        was not the peer's half-close."""
        try:
            async with task_group() as group:
                helpers = [
                    group.create_task(self._read(first, requests), name="engine-read"),
                    group.create_task(self._keep_alive(), name="engine-heartbeat"),
                    group.create_task(self._keep_deadlines(), name="engine-deadlines"),
                ]
                await self._write(context, hello)
                for task in helpers:
                    task.cancel()
        finally:
            # Without an await: this also runs when the stream was reset and we are cancelled.
            self._core.end(self._attempts.drop_all())
            self._core.drop_leases(self._attempts.drop_leases())
            self._pace.close()
            self._idle.set()

    def notify(self) -> None:
        """Something waits in the frame builder."""
        self._changed.set()

    @property
    def is_idle(self) -> bool:
        """Everything that was asked has been answered, and the answers are sent."""
        return not self._attempts.num_live and not self._builder.has_data

    async def wait_idle(self) -> None:
        """Returns when the stream is idle or has ended."""
        self._idle.clear()
        self._changed.set()  # the writer looks
        await self._idle.wait()

    def fail_live(self, error: TokenloomError) -> None:
        """Ends what is live with ``error``; the stream goes on."""
        for attempt in self._attempts.live:
            self._fail(attempt.slot, error)
        self._changed.set()

    def close(self, error: TokenloomError) -> None:
        """Fails what is live, sends what credit allows, and ends the stream with ``error``."""
        self.fail_live(error)
        self._closing = error
        self._changed.set()

    # Input

    async def _read(self, first: engine_pb2.EngineInput, requests: AsyncIterator[engine_pb2.EngineInput]) -> None:
        await self._receive(first)
        async for message in requests:
            if message.HasField("hello"):
                raise FailedPrecondition("hello: only a stream's first message may carry one")
            await self._receive(message)
        self._half_closed = True
        self._changed.set()

    async def _receive(self, message: engine_pb2.EngineInput) -> None:
        """One message: add, then accept, then stop_at, then abort."""
        self._credit.grant(message.credit)
        for add in message.add:
            await self._add(add)
        for accept in message.accept:
            await self._accept(accept)
        ended = [self._attempts.stop_at(stop.slot, stop.num_tokens) for stop in message.stop_at]
        ended += [self._attempts.abort(slot) for slot in message.abort_slots]
        self._core.end(attempt for attempt in ended if attempt is not None)
        for slot in (*(stop.slot for stop in message.stop_at), *message.abort_slots):
            self._core.drop_leases(self._attempts.drop_lease(slot))
        self._changed.set()

    async def _add(self, add: engine_pb2.AddRequest) -> None:
        self._attempts.check_slot(add.slot)
        try:
            self._admission.admit(add)
            attempt, _ = self._attempts.open(add)
        except Exception as error:  # the edge: whatever is wrong with one request, the stream goes on
            RequestLog(log, add.request_id, add.trace_headers).debug("refused: %s", error)
            self._attempts.refuse(add, error)
            return
        if self._attempts.num_live == 1:
            self._written_at = attempt.arrival  # silence counts from here
        if add.HasField("timeout"):
            self._set_deadline(add.slot, attempt.arrival + add.timeout.ToNanoseconds() / 1e9)
        self._core.open(attempt, self)
        if add.HasField("kv_source") and self._kv is not None:
            self._kv.loads.begin(attempt, add.kv_source)
            return
        try:
            await self._core.hand_over(attempt)
        except Unavailable as error:
            self._fail(add.slot, error)

    async def _accept(self, accept: engine_pb2.AcceptTokens) -> None:
        try:
            if (known := self._attempts.accept(accept)) is not None:
                await self._core.accept(known)
        except TokenloomError as error:
            self._fail(accept.slot, error)

    def _fail(self, slot: int, error: TokenloomError) -> None:
        if (attempt := self._attempts.fail(slot, error)) is not None:
            self._core.end([attempt])

    # Output

    async def _write(self, context: Context, hello: types_pb2.Hello) -> None:
        await self._send(context, engine_pb2.EngineFrame(hello=hello, step=self._core.step))
        while not self._is_done():
            if self._builder.has_data and self._is_frame_due() and self._credit.take():
                self._pace.sent()
                await self._send(context, self._builder.take(self._core.step))
            elif self._is_beat_due():
                beat = engine_pb2.EngineFrame(step=self._core.step, paused=self._core.is_paused)
                await self._send(context, beat)
            else:
                if self.is_idle:
                    self._idle.set()
                await self._changed.wait()
                self._changed.clear()
        if self._closing is not None:
            raise self._closing

    async def _send(self, context: Context, frame: engine_pb2.EngineFrame) -> None:
        self._written_at = time.monotonic()
        await context.write(frame)

    def _is_done(self) -> bool:
        if self._closing is not None:
            return not (self._builder.has_data and self._credit.left)
        return self._half_closed and self.is_idle

    def _is_frame_due(self) -> bool:
        return self._pace.is_due(urgent=self._builder.is_urgent or self._half_closed or self._closing is not None)

    def _is_beat_due(self) -> bool:
        return not self.is_idle and time.monotonic() - self._written_at >= HEARTBEAT_SECONDS

    # Time

    async def _keep_alive(self) -> None:
        """Wakes the writer for heartbeats, and ends the stream of a peer that takes nothing."""
        while True:
            due = self._written_at + HEARTBEAT_SECONDS - time.monotonic()
            await asyncio.sleep(due if due > 0 else HEARTBEAT_SECONDS)
            self._check_starved()
            if self._is_beat_due():
                self._changed.set()

    def _check_starved(self) -> None:
        if not self._builder.has_data or self._credit.left:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = time.monotonic()
        elif time.monotonic() - self._starved_since >= STARVED_SECONDS:
            raise ResourceExhausted(f"no credit for {STARVED_SECONDS:g} s while frames wait", retry_after=None)

    def _set_deadline(self, slot: int, at: float) -> None:
        if len(self._deadlines) > 2 * self._attempts.num_live + 64:  # most have ended long before their time
            self._deadlines = [entry for entry in self._deadlines if self._attempts.is_live(entry[1])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (at, slot))
        self._deadline_added.set()

    async def _keep_deadlines(self) -> None:
        """Ends attempts whose time has run out."""
        while True:
            now = time.monotonic()
            while self._deadlines and self._deadlines[0][0] <= now:
                self._fail(heapq.heappop(self._deadlines)[1], DeadlineExceeded("the request's time ran out"))
                self._changed.set()
            self._deadline_added.clear()
            try:
                async with asyncio.timeout(self._deadlines[0][0] - now if self._deadlines else None):
                    await self._deadline_added.wait()
            except TimeoutError:
                pass
