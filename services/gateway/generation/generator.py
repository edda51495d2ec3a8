"""Runs requests, whichever API they came through: admits them, prepares them and submits them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc.aio

from tokenloom.request import errors
from tokenloom.request.reasoning import ReasoningMarks
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers
from tokenloom.v1 import tokenizer_pb2, types_pb2
from tokenloom.v1.output_processor_pb2 import RecallResponse

from ..mesh.mesh_view import MeshLoad
from ..mesh.tokenizer_client import limited
from ..metrics.gateway_metrics import GatewayMetrics
from ..metrics.usage_counts import CALL_BILL, CALL_TOKENS, CallBill
from ..records.generate_request import Chat, GenerateRequest, sound_of
from ..records.pooling_input import PoolingInput, task_name
from ..records.request_ids import NEW, ResumeToken
from ..request_log.finished_request import record_generation
from ..tenants.tenant import Tenant
from .admission import AdmittedCall, AdmittedRequest, RequestAdmission
from .beam_run import BeamTexts
from .charge import Charge, Charges
from .encoded_prompt import add_hashes
from .preparation import MeshLinks, Prepared, Preparer, RequestContext, cache_salt
from .request_trace import GatewayTrace, traced
from .resumable import ResumableRequests
from .running_generation import RunningGeneration
from .running_pooling import MOST_AT_ONCE, PoolingStage, RunningPooling, check_task, encode

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

    from ..mesh.encoder_client import RequestMedia
    from ..records.media import HeldFiles, MediaPart

_CONNECTION_ENDED = (asyncio.CancelledError, grpc.aio.BaseError)
"""Raised within a call whose client has gone: a gateway cannot distinguish a lost connection from a cancelled call."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Holds what every call has.

    Attributes:
        held: Gives back at its end what the call holds.
        trace: Of the call; None: it is not traced.
        limit: Ends it after ``timeout`` seconds.
        model: Name of the model or adapter that it asks for.
    """

    held: ExitStack
    trace: GatewayTrace | None
    limit: asyncio.Timeout
    timeout: float
    model: str

    def seconds_left(self) -> float:
        """Return the seconds until the limit."""
        when = self.limit.when()
        assert when is not None
        return when - asyncio.get_running_loop().time()


def _open_bill(bill: "CpuBill", request: GenerateRequest, held: ExitStack) -> CallBill:
    """Return the bill of a call. ``held``: ends it."""
    opened = CallBill(bill, request.tenant.name)
    held.callback(opened.close)
    CALL_BILL.set(opened)
    return opened


class Generator:
    """Admits requests and runs them: those that generate, and those that pool."""

    def __init__(
        self,
        links: MeshLinks,
        context: RequestContext,
        metrics: GatewayMetrics,
        admission: RequestAdmission,
        resumable: ResumableRequests,
        *,
        reasoning_marks: ReasoningMarks | None = None,
    ) -> None:
        """``reasoning_marks``: the marks around the model's reasoning; None: they are not known."""
        self._links = links
        self._context = context
        self._reasoning_marks = reasoning_marks
        self._preparer = Preparer(links, context)
        self._outputs = links.outputs
        self._texts = BeamTexts(links.tokenizers)
        self._metrics = metrics
        self._admission = admission
        self._resumable = resumable
        self._pooling = PoolingStage()
        self._charges = Charges(lambda: asyncio.get_running_loop().time())

    @property
    def num_live(self) -> int:
        """Outputs that clients wait for."""
        return self._admission.num_live

    @property
    def default_timeout(self) -> float:
        """Seconds of a request that asks for no other time."""
        return self._context.default_timeout

    @property
    def reasoning_marks(self) -> ReasoningMarks | None:
        """The marks around the model's reasoning; None: they are not known."""
        return self._reasoning_marks

    def draw_id(self) -> str:
        """Return a random id."""
        return self._context.draw_id()

    @property
    def mesh_load(self) -> MeshLoad:
        """The engines' load, as last reported."""
        return self._links.view.load()

    @property
    def knows_engines(self) -> bool:
        """Whether an engine has served since the start."""
        return self._links.view.limits is not None

    @asynccontextmanager
    async def open(
        self,
        request: GenerateRequest,
        trace_headers: Headers = NO_HEADERS,
        token: ResumeToken = NEW,
        *,
        outlives_call: bool = True,
    ) -> AsyncIterator[RunningGeneration]:
        """Run a generation for the length of the ``async with``; cancel it at the end if it still runs.

        Args:
            trace_headers: Of the trace that the client has begun.
            token: Which request of the mesh it is.
            outlives_call: Whether a request that can be resumed runs on when the call is cancelled, because its client
                may only have lost the connection. False: only a decision cancels the call.

        Raises any of :mod:`errors`; :class:`errors.DeadlineExceeded` covers the time of the body too.
        """
        if request.beam_search is not None:
            # It has no output before its end, and the same outputs each time: a call that resumes or repeats it
            # searches again. Nothing of it is kept, and each call is charged for what it computes.
            token = ResumeToken(token.request_id)
        async with self._call(request, trace_headers) as call:
            before = self._resumable.find(token, request.tenant.name) if token.request_id else None
            if before is None:
                if token.resumes:  # its client has had the first token, or has waited for longer
                    request = replace(request, ttft_deadline=None)
                was_accepted = token.resumes or (token.is_held and token.takes_over)
                try:
                    admitted = self._admission.admit(request, call.timeout, was_accepted=was_accepted)
                except errors.ResourceExhausted:
                    # A client that repeats a call, because its gateway was lost, says so by the key alone.
                    if not token.takes_over or not await self._has_begun(token, request.tenant.name):
                        raise
                    admitted = self._admission.admit(request, call.timeout, was_accepted=True)
                admitted_call = AdmittedCall(admitted)
            else:  # the call takes over the hold of one without a client
                self._admission.check_open()
                admitted_call = before.succeed()
            # Before anything is awaited: a call that is cancelled while its prompt is encoded must give back, too, what
            # it holds.
            call.held.callback(admitted_call.end)
            bill = None if self._context.bill is None else _open_bill(self._context.bill, request, call.held)
            media = None
            if isinstance(request.prompts, Chat) and request.prompts.media:
                if self._links.encoders is not None and self._links.view.limits is None:
                    await self._links.view.wait_limits()  # how many images a prompt may have is the engines' limit
                media = self._hold_media(request, call.held)
            is_search, tenant = request.beam_search is not None, request.tenant
            admitted, is_bounded = admitted_call.admitted, request.sampling.HasField("max_tokens")
            prepared = await self._preparer.prepare(request, media)
            admitted.take_tokens(prepared.num_prompt_tokens, prepared.num_output_tokens, is_bounded=is_bounded)
            generation = RunningGeneration(
                prepared,
                self._context.random.randbytes(16).hex(),
                self._metrics,
                self._reasoning_marks,
                admitted.begin_output,
                token,
                model=call.model,
            )
            if bill is not None:
                generation.bill, bill.counts = bill, generation.completion_tokens
            del request, prepared  # the client's texts, which may be large, must not live as long as its answer
            call.held.callback(self._settle, admitted, generation, tenant)
            if call.trace is not None:
                call.trace.outcome = generation
            is_kept = False
            try:
                if is_search:
                    generation.search(self._outputs, self._texts, timeout=call.timeout)
                else:
                    generation.submit(self._outputs, timeout=call.timeout)
                if token.fingerprint and not token.is_held:
                    generation.charge = self._charges.of(tenant.name, generation.request_id, token)
                    self._resumable.add(generation, tenant.name, admitted_call)
                elif token.resumes:  # only here: no further call of this gateway gets the output
                    generation.charge = Charge.of(token)
                await asyncio.sleep(0)  # send it now: the answer is prepared while it is on its way
                yield generation
            except _CONNECTION_ENDED:
                # A call that ran out of time is cancelled as well, but its client has had its answer: only a lost
                # connection counts.
                is_kept = outlives_call and not call.limit.expired() and self._resumable.abandon(generation, call.held)
                raise
            finally:
                record_generation(generation)
                if not is_kept:
                    self._resumable.remove(generation)
                    generation.close()

    async def _has_begun(self, token: ResumeToken, tenant: str) -> bool:
        """Return whether an output processor has a request, or its first prompt if there are several."""
        first = f"{token.request_id}-0"
        return await self._outputs.has(token.request_id, tenant) or await self._outputs.has(first, tenant)

    @asynccontextmanager
    async def pool(
        self, pooling: PoolingInput, trace_headers: Headers = NO_HEADERS, *, was_accepted: bool = False
    ) -> AsyncIterator[RunningPooling]:
        """Run a pooling call to its last result, and hold its place for the length of the ``async with``.

        ``was_accepted``: as of :meth:`RequestAdmission.admit`. Raises as :meth:`open`.
        """
        started_ns, request = self._context.clock(), pooling.request
        limits = await self.wait_limits(request.timeout)
        check_task(pooling.params, limits)
        task = task_name(pooling.params.task)
        async with self._call(request, trace_headers, task) as call:
            admitted = self._admission.admit(
                request, call.timeout, most_at_once=MOST_AT_ONCE, was_accepted=was_accepted
            )
            call.held.callback(admitted.close)
            bill = None if self._context.bill is None else _open_bill(self._context.bill, request, call.held)
            prompts = await encode(pooling, self._links.tokenizers, limits)
            if sound_of(request.prompts) is None:  # its blocks are found by no other
                await add_hashes(prompts, self._links.view.block_size, cache_salt(request))
            priority = self._context.priority_of(request, limits)
            running = RunningPooling(pooling, prompts, self._context, priority, self._pooling)
            if bill is not None:
                bill.counts = (CALL_TOKENS * len(prompts),)
            admitted.num_used = running.usage.prompt_tokens
            admitted.take_tokens(admitted.num_used)
            if call.trace is not None:
                call.trace.outcome = running
            try:
                await running.run(self._outputs, admitted, call.seconds_left)
                seconds = (self._context.clock() - started_ns) / 1e9
                self._metrics.observe_pooled(task, running.usage, request.tenant, running.num_ended, seconds)
                yield running
            finally:
                record_generation(running)
                running.close()

    @contextmanager
    def hear(self, part: "MediaPart", request: GenerateRequest) -> "Iterator[RequestMedia]":
        """Hold a call that makes several requests of one sound, and the sound at encoders. Each of these requests is
        admitted by itself, also while the gateway drains.

        ``request``: like all of them, without prompts. Raises ``Unavailable`` while the gateway drains.
        """
        encoders = self._links.encoders
        assert encoders is not None, "a model that transcribes has encoders"
        with self._admission.hold():
            sound = encoders.open([part], {}, encoders.owner(request.tenant.name, cache_salt(request)))
            try:
                yield sound
            except errors.InvalidArgument as error:
                sound.name(error)
                raise
            finally:
                sound.release()

    async def tokenize(
        self, chat: Chat, tenant: Tenant, files: "HeldFiles | None" = None, *, want_token_strings: bool = False
    ) -> tokenizer_pb2.TokenizedPrompt:
        """Return the tokens of a conversation that is not answered, with those of its images, whose sizes decide how
        many there are. Raises as :meth:`open`."""
        sizes: Sequence[tokenizer_pb2.MediaSize] = ()
        with ExitStack() as held:
            if chat.media:
                request = GenerateRequest(chat, "messages", types_pb2.SamplingParams(), tenant=tenant, files=files)
                sizes = await self._hold_media(request, held).put()
            elif files is not None:
                from ..records.media import check_used  # here: most conversations have none

                check_used(files.files, ())
            encoding = self._links.tokenizers.encode_chat(
                chat, want_token_strings=want_token_strings, tenant=tenant.name, media=sizes
            )
            return (await encoding).prompt

    async def render(self, request: GenerateRequest) -> Prepared:
        """Return what would be sent to output processors, without sending it: encoders may forget its images then.
        Raises as :meth:`open`."""
        await self.wait_limits(request.timeout)  # counts the call until the first engine serves
        with ExitStack() as held:
            has_media = isinstance(request.prompts, Chat) and bool(request.prompts.media)
            return await self._preparer.prepare(request, self._hold_media(request, held) if has_media else None)

    def limits(self) -> types_pb2.ModelLimits:
        """Return the limits of the model. Raises ``Unavailable`` before the first engine serves."""
        return self._links.limits()

    async def wait_limits(self, timeout: float | None = None) -> types_pb2.ModelLimits:
        """Return the limits of the model, once an engine serves. Raises ``DeadlineExceeded`` after ``timeout`` seconds,
        and after those that any request may take."""
        view, most = self._links.view, self._context.default_timeout
        if view.limits is not None:
            return view.limits
        with self._admission.come_early():
            async with limited(min(timeout or most, most)):
                return await view.wait_limits()

    def cancel(self, request_id: str, tenant: str) -> None:
        """End a request that its client can resume, at this gateway or any other one. It need not be known."""
        self._charges.forget(tenant, request_id)
        if not self._resumable.cancel(request_id, tenant):
            self._outputs.withdraw(request_id, tenant)

    async def recall(self, request_id: str, tenant: str, *, with_prompt: bool = False) -> RecallResponse:
        """Return what a request was begun with, at whichever gateway, that can be resumed. Raises ``RequestLost``."""
        return await self._outputs.recall(request_id, tenant, with_prompt=with_prompt)

    async def until_kept(self, request_id: str, tenant: str) -> None:
        """Return once an output processor has a request that began here, so that other gateways find it."""
        await self._outputs.until_kept(request_id, tenant)

    async def end_of_present(self) -> None:
        """Return when the generations that are open now have ended; new ones are still admitted."""
        await self._admission.end_of_present()

    def leave_resumable(self) -> None:
        """End the calls whose clients can continue through another gateway."""
        self._resumable.leave()

    async def drain(self) -> None:
        """Refuse new generations, and return when none is open."""
        await self._admission.drain()

    async def close(self) -> None:
        """Cancel the requests whose client's connection has ended."""
        await self._resumable.close()
        if self._links.encoders is not None:
            await self._links.encoders.close()

    @asynccontextmanager
    async def _call(self, request: GenerateRequest, headers: Headers, task: str = "") -> "AsyncIterator[_Call]":
        """Trace a call, limit its time, and give back what it holds at its end. ``task``: of a call that pools."""
        context = self._context
        timeout = min(request.timeout or context.default_timeout, context.default_timeout)
        model = context.model if request.adapter is None else request.adapter.name
        tracing = nullcontext() if context.tracer is None else traced(context.tracer, request, headers, model, task)
        del request  # as in :meth:`open`
        with ExitStack() as held, tracing as trace:
            try:
                async with asyncio.timeout(timeout) as limit:
                    yield _Call(held, trace, limit, timeout, model)
            except TimeoutError:
                raise errors.DeadlineExceeded(f"the request took longer than {timeout:g} s") from None

    def _hold_media(self, request: GenerateRequest, held: ExitStack) -> "RequestMedia":
        """Return what places the images of a request. ``held``: gives back what they take."""
        media = self._preparer.open_media(request)
        held.push(lambda _, error, __: media.name(error) if isinstance(error, errors.InvalidArgument) else None)
        held.callback(media.release)
        held.callback(self._admission.take_files(request).release)
        if request.files is not None:
            request.files.hold()
            held.callback(request.files.close)
        return media

    def _settle(self, admitted: AdmittedRequest, generation: RunningGeneration, tenant: Tenant) -> None:
        """Count what a call has used of its request, at its end."""
        if (turn := generation.turn) is not None and (ended := generation.ended_turn) is not None:
            self._preparer.past_turns.put(tenant.name, ended, turn.replaced)
            self._metrics.observe_miss(generation.usage.cache_miss)
        used = generation.settle()
        admitted.num_used += used.num_tokens + generation.num_rejected_tokens
        self._metrics.observe_end(generation, tenant, used)
        if generation.fingerprint and (charge := generation.charge) is not None:
            self._charges.leave(tenant.name, generation.request_id, charge, is_complete=generation.is_complete)
