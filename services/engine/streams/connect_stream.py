"""One ``Connect`` stream: reads Adds, stops and aborts; writes a frame per step, within credit. Keeps its attempts by
slot: every Add gets exactly one Finished, whatever happens first."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import TypeAlias

import grpc.aio
import msgspec

from tokenloom.engine_core.data.embedding_rows import RowsKey
from tokenloom.engine_core.data.messages import (
    AcceptTokens,
    EngineCoreOutput,
    ErrorKind,
    FinishReason,
    PrefillStats,
)
from tokenloom.request import errors, validation, wire_errors
from tokenloom.request.routed_rows import RoutedRows, routed_message
from tokenloom.services.runtime.peers.hello import LIVE_MOVES, is_foreign
from tokenloom.services.runtime.streams.slotted_stream import ServerStream
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import pick_headers
from tokenloom.v1 import coordinator_pb2, engine_pb2, types_pb2

from ..core.core_link import CoreLink
from ..kv.kv_front import KVFront
from ..records.attempt import Attempt, AttemptKV, AttemptMedia, AttemptTimes, TokenCounts
from ..records.core_request import to_core_request
from ..records.load import LoadTracker
from .frame_builder import FrameBuilder, FramePace, wire_logprobs

log = logging.getLogger(__name__)

_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
    FinishReason.REPETITION: types_pb2.FINISH_REASON_REPETITION,
    FinishReason.PREFILLED: types_pb2.FINISH_REASON_PREFILLED,
}


_ERRORS: dict[ErrorKind, type[errors.TokenloomError]] = {
    ErrorKind.UNAVAILABLE: errors.Unavailable,
    ErrorKind.INTERNAL: errors.Internal,
    ErrorKind.ENGINE_FULL: errors.ResourceExhausted,
    ErrorKind.TENANT_FULL: errors.RateLimitExceeded,
    ErrorKind.LEAVING: errors.TryElsewhere,
    ErrorKind.NO_ADAPTER: errors.TryElsewhere,
    ErrorKind.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    ErrorKind.QUERY_LOST: errors.QueryLost,
    ErrorKind.LACKS: errors.EngineLacks,
}


class Attempts:
    """Owns the live attempts of one stream and puts what they produce into a frame builder.

    Methods that end an attempt return it, so that the caller can abort it in the core; None if the slot was not live.

    Attributes:
        live: The live attempts by slot.
        notify: To be called when the frame builder has something to send.
        may_move: Whether they may go on at other engines while they run.
        is_amid_step: As in :class:`StreamAttempts`.
    """

    def __init__(
        self,
        stream_id: int,
        limits: types_pb2.ModelLimits,
        builder: FrameBuilder,
        notify: Callable[[], None],
        clock: Callable[[], float],
        random: Random,
        *,
        kv_owner: coordinator_pb2.EngineRef | None = None,
        lease_seconds: float = 0.0,
    ) -> None:
        """``clock`` returns seconds. ``random`` draws leases and seeds. ``kv_owner``: this engine as the owner of KV
        under leases of ``lease_seconds``; None if it serves no KV."""
        self.live: dict[int, Attempt] = {}
        self.notify = notify
        self.may_move = self.is_amid_step = False
        self._kv_owner = kv_owner
        self._lease_seconds = lease_seconds
        self._stream_id = stream_id
        self._limits = limits
        self._builder = builder
        self._clock = clock
        self._random = random
        # By slot: key and expiry of finished prefills whose KV may still be held. Bounded by the leases that can exist.
        self._held: dict[int, tuple[str, float]] = {}

    def open(self, add: engine_pb2.AddRequest) -> Attempt:
        """Validate an Add and make it live. Raises what is wrong with it; the caller then calls :meth:`refuse`."""
        if add.hold_kv and self._kv_owner is None:
            raise errors.InvalidArgument("hold_kv is set, but this engine serves no KV to other engines", "hold_kv")
        # Not the request's id: a retry, or another sample of the request, may run here at the same time.
        key = f"{self._stream_id}.{add.slot}"
        request = to_core_request(add, key, self._limits, self._random)
        num_accepted = len(request.accepted_token_ids)
        attempt = self.live[add.slot] = Attempt(
            slot=add.slot,
            key=key,
            request_id=add.request_id,
            trace_headers=pick_headers(add.trace_headers.items()) if add.trace_headers else None,
            request=request,
            tokens=TokenCounts(request.num_prompt_tokens, num_accepted, num_accepted),
            times=AttemptTimes(self._clock()),
            kv=AttemptKV(request.lease_id, request.awaits_tokens),
            pooling_task=None if request.pooling_params is None else request.pooling_params.task,
        )
        if request.media:
            items = {RowsKey(item.key, item.num_rows, item.levels): item for item in add.prompt.media}
            attempt.media = AttemptMedia(items, add.tenant, request.cache_salt)
        return attempt

    def refuse(self, add: engine_pb2.AddRequest, error: BaseException) -> None:
        """Answer an Add that never became live."""
        self._builder.finish(
            engine_pb2.Finished(
                slot=add.slot,
                reason=types_pb2.FINISH_REASON_ERROR,
                num_output_tokens=len(add.accepted_token_ids),
                error=wire_errors.to_proto(error),
            )
        )

    def accept(self, accept: engine_pb2.AcceptTokens) -> AcceptTokens | None:
        """Add the tokens of the prefill leg to an attempt. Returns the message for the core if it has the request
        already. Raises ``InvalidArgument`` for invalid tokens."""
        attempt = self.live.get(accept.slot)
        if attempt is None:
            return None
        if not attempt.kv.awaits_tokens:
            raise errors.InvalidArgument(
                "accept: the attempt was not added with awaits_tokens, or has its tokens", "accept"
            )
        tokens = attempt.tokens
        validation.check_accepted(accept.token_ids, tokens.prompt + tokens.accepted, self._limits)
        attempt.kv.awaits_tokens = False
        tokens.accepted += len(accept.token_ids)
        tokens.output += len(accept.token_ids)
        if (request := attempt.request) is None:
            return AcceptTokens(attempt.key, list(accept.token_ids))
        request.accepted_token_ids = [*request.accepted_token_ids, *accept.token_ids]
        request.awaits_tokens = False
        return None

    def take_output(self, attempt: Attempt, output: EngineCoreOutput) -> None:
        """Put what a step produced for a live attempt into the frame builder."""
        if output.kv_granted_tokens:
            self._builder.grant(attempt.slot, self._kv_source(attempt, output.kv_granted_tokens), attempt.kv.target)
        elif output.is_kept:
            self._builder.grant(attempt.slot, None, "")
            attempt.kv.stay()
        if output.new_prompt_logprobs is not None:
            self._builder.add_prompt(attempt.slot, output.new_prompt_logprobs)
        if output.new_token_ids:
            logprobs = wire_logprobs(output.new_logprobs) if output.new_logprobs is not None else None
            self._builder.add_tokens(attempt.slot, output.token_index, output.new_token_ids, logprobs)
            attempt.tokens.output = output.token_index + len(output.new_token_ids)
        if output.pooled is not None:
            self._builder.add_pooled(attempt.slot, output.pooled)
        if output.routed_experts is not None:
            attempt.routed = attempt.routed or RoutedRows(output.routed_experts.start)
            attempt.routed.add(output.routed_experts)
        if output.prefill_stats is not None:
            attempt.times.prefill = output.prefill_stats
        attempt.kv.wait_ns += output.kv_wait_ns
        if output.cpu_ns:
            attempt.core_cpu_ns = output.cpu_ns
        if output.finish_reason is FinishReason.ERROR:
            self.fail(attempt.slot, _failure(output))
        elif output.finish_reason is not None:
            drafts = None if output.drafts is None else types_pb2.DraftCounts(**msgspec.structs.asdict(output.drafts))
            self._finish(
                attempt,
                output.finish_reason,
                stop_token_id=output.stop_token_id,
                drafts=drafts,
                preempted_at=output.preempted_at,
            )

    def stop_at(self, slot: int, num_tokens: int) -> Attempt | None:
        """End an attempt in which the peer found a stop string, with at most ``num_tokens`` tokens. An end that has not
        been sent yet becomes a stop too."""
        # The front ends the attempt by itself, since a stop string needs nothing from the scheduler; the core is only
        # asked to free the blocks. Tokens of steps in flight are then dropped by the front.
        self._builder.cut(slot, num_tokens)
        attempt = self.live.get(slot)
        if attempt is None:
            return None
        attempt.tokens.output = min(num_tokens, attempt.tokens.output)
        return self._finish(attempt, FinishReason.STOP)

    def abort(self, slot: int) -> Attempt | None:
        """End an attempt that the peer has aborted."""
        attempt = self.live.get(slot)
        return attempt and self._finish(attempt, FinishReason.ABORT)

    def fail(self, slot: int, error: errors.TokenloomError) -> Attempt | None:
        """End an attempt that cannot continue: its time ran out, the core died or the engine is leaving."""
        attempt = self.live.get(slot)
        return attempt and self._finish(attempt, FinishReason.ERROR, error=error)

    def drop_lease(self, slot: int) -> list[str]:
        """Forget the KV of a finished prefill, which the peer does not want. Returns its key, if it was held."""
        held = self._held.pop(slot, None)
        return [held[0]] if held is not None else []

    def drop_leases(self) -> list[str]:
        """Forget the KV of all finished prefills, when the stream has ended. Returns their keys."""
        held, self._held = self._held, {}
        return [key for key, _ in held.values()]

    def drop_all(self) -> list[Attempt]:
        """Forget every live attempt without an answer, when the stream has ended."""
        attempts = list(self.live.values())
        for attempt in attempts:
            attempt.finish_reason = FinishReason.ABORT
            attempt.request = None
        self.live.clear()
        return attempts

    def _finish(
        self,
        attempt: Attempt,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: errors.TokenloomError | None = None,
        drafts: types_pb2.DraftCounts | None = None,
        preempted_at: Sequence[int] = (),
    ) -> Attempt:
        del self.live[attempt.slot]
        attempt.finish_reason = reason
        attempt.request = None
        kv = self._hold(attempt) if reason is FinishReason.PREFILLED else None
        stats = attempt.times.prefill or PrefillStats(0, 0, round((self._clock() - attempt.times.arrival) * 1e9), 0)
        self._builder.finish(
            engine_pb2.Finished(
                slot=attempt.slot,
                reason=_REASONS[reason],
                num_output_tokens=attempt.tokens.output,
                stop_token_id=stop_token_id,
                cached_tokens=stats.num_cached_tokens,
                kv=kv,
                error=wire_errors.to_proto(error) if error else None,
                queued_ns=stats.queued_ns,
                kv_wait_ns=attempt.kv.wait_ns,
                prefill_ns=stats.prefill_ns,
                drafts=drafts,
                routed_experts=routed_message(attempt.routed) if attempt.routed else None,
                preempted_at=preempted_at,
                cpu_ns=0 if attempt.account is None else attempt.settle(),
            )
        )
        return attempt

    def _hold(self, attempt: Attempt) -> engine_pb2.KVSource:
        now = self._clock()
        while self._held and next(iter(self._held.values()))[1] <= now:  # oldest first
            del self._held[next(iter(self._held))]
        self._held[attempt.slot] = attempt.key, now + self._lease_seconds
        return self._kv_source(attempt, attempt.tokens.prompt + attempt.tokens.output - 1)

    def _kv_source(self, attempt: Attempt, num_tokens: int) -> engine_pb2.KVSource:
        assert self._kv_owner is not None, "only attempts with a lease offer KV"
        return engine_pb2.KVSource(
            engine_id=self._kv_owner.engine_id,
            engine_epoch=self._kv_owner.epoch,
            lease_id=attempt.kv.lease_id,
            num_tokens=num_tokens,
            bound_tokens=0 if attempt.kv.target is None else attempt.tokens.num_given,
        )


def _failure(output: EngineCoreOutput) -> errors.TokenloomError:
    message = output.error or "the engine failed this request"
    if output.error_field:
        return errors.InvalidArgument(message, output.error_field)
    return _ERRORS[output.error_kind](message)


def _ignore(_: object) -> None:
    """Do nothing."""


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
        self._attempts.may_move = owner is not None and LIVE_MOVES in peer.features
        self.on_quarantine: Callable[[engine_pb2.Quarantine], object] = _ignore
        """Called when a peer says that the engine computes wrong tokens."""
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

    def fail_live(self, error: errors.TokenloomError) -> None:
        """End all live attempts with ``error``; the stream continues."""
        for attempt in list(self._attempts.live.values()):
            self._fail(attempt.slot, error)

    def close(self, error: errors.TokenloomError) -> None:
        """Fail all live attempts, send what credit allows, and end the stream with ``error``."""
        self.fail_live(error)
        super().close(error)

    async def _receive(self, message: engine_pb2.EngineInput) -> None:
        """Process one message: add, then accept, then stop_at, then abort, then keep."""
        for count, add in enumerate(message.add, 1):
            await self._add(add)
            # A message may hold hundreds of requests. In one turn their checks would delay the frames of all that run.
            if not count % ADDS_PER_TURN:
                await asyncio.sleep(0)
        for accept in message.accept:
            await self._accept(accept)
        if message.stop_at or message.abort_slots:
            self._end(message)
        if message.HasField("quarantine"):
            self.on_quarantine(message.quarantine)
        moving = (self._attempts.live.get(slot) for slot in message.keep_slots)
        kept = [attempt for attempt in moving if attempt is not None and attempt.kv.target is not None]
        # At once: the core answers one call in a step, and those that came last would have left before their turn.
        await asyncio.gather(*map(self._core.keep, kept))

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
        except Exception as failure:  # the edge: a bad request must not end the stream
            error = failure
            if isinstance(error, errors.InvalidArgument) and is_foreign(self._core.ready.numerics):
                # What is checked here are limits: those of the mesh's own engines may be wider.
                error = errors.EngineLacks(f"this engine computes by a server of others: {error.message}")
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
        if self._core.bill is not None:
            attempt.account = self._core.bill.open(add.tenant, attempt.work)
        self._core.open(attempt, self._attempts)
        if add.HasField("kv_source") and self._kv is not None:
            self._kv.loads.begin(attempt, add.kv_source)
            return
        try:
            await self._core.hand_over(attempt)
        except errors.TokenloomError as error:
            self._fail(add.slot, error)

    async def _accept(self, accept: engine_pb2.AcceptTokens) -> None:
        try:
            if (known := self._attempts.accept(accept)) is not None:
                await self._core.accept(known)
        except errors.TokenloomError as error:
            self._fail(accept.slot, error)

    def _expire(self, slot: int) -> None:
        self._fail(slot, errors.DeadlineExceeded("the request timed out"))

    def _fail(self, slot: int, error: errors.TokenloomError) -> None:
        if (attempt := self._attempts.fail(slot, error)) is not None:
            self._core.end([attempt])
            self._changed.set()

    def _next_frame(self) -> engine_pb2.EngineFrame | None:
        # A frame that is due holds all that waits. Before it is due, only what is urgent is sent; so are the first
        # tokens of a step whose other tokens follow.
        builder = self._builder
        if not builder.has_data:
            return None
        is_due = not self._attempts.is_amid_step and self._pace.is_due(
            urgent=self._half_closed or self._closing is not None
        )
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
