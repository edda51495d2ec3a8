"""The stream of one gateway: its requests, its credit, its frames."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from tokenloom.request import errors, validation
from tokenloom.services.runtime.host.tasks import Tasks
from tokenloom.services.runtime.peers.credit import Credit
from tokenloom.services.runtime.peers.hello import HEARTBEAT_SECONDS, check_hello
from tokenloom.services.runtime.telemetry.tracing import Tracer
from tokenloom.v1.output_processor_pb2 import ProcessFrame, ProcessInput, RequestFinished, Resume, Submit
from tokenloom.v1.types_pb2 import FinishReason, Hello

from ..metrics import Metrics
from ..placement.placement import Asked, Placer
from ..request.sample_group import SampleGroup, num_samples
from ..request.submit_trace import RequestTrace
from ..request_slots import Admission
from ..text.detokenizer import Vocabulary
from .outbox import Outbox

_NO_CREDIT_SECONDS = 5.0  # after which a gateway that takes nothing is given up
_LIMITS_SECONDS = 2.0  # a gateway may have heard of the first engine a moment before us


@dataclass(frozen=True, slots=True)
class Parts:
    """What all sessions share."""

    hello: Hello
    vocabulary: Vocabulary
    eos_token_ids: frozenset[int]
    placer: Placer
    admission: Admission
    metrics: Metrics
    tracer: Tracer | None = None


class Session:
    """One ``Process`` stream. When it ends, however it ends, its requests are aborted."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._live: dict[int, SampleGroup] = {}  # bounded by admission
        self._last_slot = 0
        self._credit = Credit()
        self._wake = asyncio.Event()
        # The writer wakes once all of an engine's frame was dealt out, so that a step is one frame here too.
        self._outbox = Outbox(self._wake.set)
        self._half_closed = False
        self._failure: BaseException | None = None
        self._tasks = Tasks(self._fail)
        self._written_at = 0.0
        self._blocked_at: float | None = None

    async def frames(self, messages: AsyncIterator[ProcessInput]) -> AsyncGenerator[ProcessFrame, None]:
        """What the gateway is to be sent: our hello, then a frame for each step of an engine, until it closes its
        side and nothing is live. Raises what ends the stream: a wrong hello, a reused slot, no credit for too long.
        """
        messages = aiter(messages)
        try:
            first = await anext(messages, None)
            if first is None:
                return
            check_hello(
                first.hello,
                peer_id=self._parts.hello.peer_id,
                epoch=self._parts.hello.epoch,
                fingerprint=self._parts.hello.fingerprint,
            )
            self._credit.grant(first.hello.initial_credit)
            yield ProcessFrame(hello=self._parts.hello)
            self._tasks.spawn(self._read(first, messages), name="gateway-read")
            self._tasks.spawn(self._keep_awake(), name="gateway-heartbeat")
            while (frame := await self._next_frame()) is not None:
                yield frame
        finally:
            for group in list(self._live.values()):
                group.cancel()
            await self._tasks.close()

    async def _read(self, first: ProcessInput, messages: AsyncIterator[ProcessInput]) -> None:
        await self._receive(first)
        async for message in messages:
            await self._receive(message)
        self._half_closed = True
        self._wake.set()

    async def _receive(self, message: ProcessInput) -> None:
        if message.submit:
            if self._parts.placer.limits is None:
                await self._parts.placer.wait_limits(_LIMITS_SECONDS)
            await self._take_submits(message.submit)
        for resume in message.resume:
            self._refuse_resume(resume)
        for slot in message.cancel_slots:
            if (group := self._live.get(slot)) is not None:
                group.cancel()
        self._credit.grant(message.credit)
        self._wake.set()

    async def _take_submits(self, submits: Sequence[Submit]) -> None:
        """Asks for engines first: while that is on its way and back, the requests are checked and made."""
        asked = [self._ask(submit) for submit in submits]
        if any(asked):
            await asyncio.sleep(0)  # the picks are written now
        for submit, pick in zip(submits, asked, strict=True):
            self._submit(submit, pick)

    def _ask(self, submit: Submit) -> Asked | None:
        return self._parts.placer.ask(submit) if self._parts.admission.has_room(num_samples(submit)) else None

    def _take_slot(self, slot: int) -> None:
        if slot <= self._last_slot:
            raise errors.InvalidArgument(f"slot {slot}: slots only grow, the last one was {self._last_slot}", "slot")
        self._last_slot = slot

    def _refuse_resume(self, resume: Resume) -> None:
        self._take_slot(resume.slot)
        self._refuse(resume.slot, errors.NotFound("taking over a request is not supported yet"))

    def _refuse(self, slot: int, error: BaseException) -> None:
        reason = FinishReason.FINISH_REASON_ERROR
        self._outbox.finish(RequestFinished(slot=slot, reason=reason, error=errors.to_proto(error)))

    def _submit(self, submit: Submit, asked: Asked | None) -> None:
        self._take_slot(submit.slot)
        try:
            self._check(submit)
            group = self._group(submit)
            self._parts.admission.enter(num_samples(submit))
        except Exception as error:  # one request's fault never ends the stream of all
            self._refuse(submit.slot, error)
            return
        if not self._live:
            self._written_at = time.monotonic()  # the first heartbeat is due from now on
        self._live[submit.slot] = group
        group.start(self._parts.placer, self._tasks, asked)

    def _group(self, submit: Submit) -> SampleGroup:
        trace = RequestTrace.open(self._parts.tracer, submit)

        def sample_ended(finished: RequestFinished) -> None:
            self._sample_ended(finished)
            if trace is not None:
                trace.sample_ended(finished)

        def ended() -> None:
            self._live.pop(submit.slot)
            if trace is not None:
                trace.end()

        return SampleGroup(
            submit,
            self._parts.vocabulary,
            self._parts.eos_token_ids,
            self._outbox,
            on_sample_end=sample_ended,
            on_end=ended,
        )

    def _check(self, submit: Submit) -> None:
        if submit.WhichOneof("task") != "sampling_params":
            raise errors.InvalidArgument("sampling_params is missing", "sampling_params")
        validation.check_samples(num_samples(submit))
        if submit.num_samples > 1 and submit.accepted_token_ids:
            raise errors.InvalidArgument("accepted_token_ids continue one sample, not several", "accepted_token_ids")
        validation.check_text(submit.text)
        limits = self._parts.placer.limits
        if limits is None:
            raise errors.Unavailable("no engine is serving this model yet; try again")
        validation.check_generate(
            submit.prompt.token_ids,
            submit.sampling_params,
            limits,
            accepted_token_ids=submit.accepted_token_ids,
            num_samples=num_samples(submit),
        )

    def _sample_ended(self, finished: RequestFinished) -> None:
        self._parts.admission.leave()
        self._parts.metrics.ended(finished)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._wake.set()

    async def _next_frame(self) -> ProcessFrame | None:
        """The next frame to send, None when there will be none."""
        while True:
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            if self._outbox:
                if self._credit.take():
                    self._written_at, self._blocked_at = now, None
                    return self._outbox.take()
                self._check_blocked(now)
            elif self._half_closed and not self._live:
                return None
            if (self._live or self._outbox) and now - self._written_at >= HEARTBEAT_SECONDS:
                self._written_at = now
                return ProcessFrame()
            await self._wake.wait()
            self._wake.clear()

    def _check_blocked(self, now: float) -> None:
        self._blocked_at = self._blocked_at or now
        if now - self._blocked_at > _NO_CREDIT_SECONDS:
            raise errors.ResourceExhausted(f"no credit for {_NO_CREDIT_SECONDS:g} s while output waits")

    async def _keep_awake(self) -> None:
        """Wakes the writer for heartbeats, and to give up a gateway that takes nothing."""
        while True:
            due = self._written_at + HEARTBEAT_SECONDS - time.monotonic()
            await asyncio.sleep(due if due > 0 else HEARTBEAT_SECONDS)
            self._wake.set()
