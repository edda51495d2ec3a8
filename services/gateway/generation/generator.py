"""Runs requests, whichever API they came through: admits them, prepares them and submits them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext
from random import Random

import grpc.aio

from tokenloom.request import errors
from tokenloom.request.reasoning import ReasoningMarks
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, Tracer

from ..mesh.mesh_view import MeshLoad, MeshView
from ..mesh.output_pool import OutputPool
from ..mesh.tokenizer_client import TokenizerClient
from ..metrics.gateway_metrics import GatewayMetrics
from ..records.generate_request import GenerateRequest
from ..records.resume_token import NEW, ResumeToken
from ..request_log.request_record import record_generation
from ..settings.gateway_settings import DEFAULT_MAX_VALUES
from ..tenants.tenant import Tenant
from .admission import AdmittedCall, AdmittedRequest, RequestAdmission
from .beam_outputs import BeamTexts
from .charge import Charges
from .preparation import Preparer
from .request_trace import traced
from .resumable import ResumableRequests
from .running_generation import RunningGeneration

_CONNECTION_ENDED = (asyncio.CancelledError, grpc.aio.BaseError)
"""Raised within a call whose client has gone: a gateway cannot distinguish a lost connection from a cancelled call."""


class Generator:
    """Admits requests and runs them."""

    def __init__(
        self,
        tokenizers: TokenizerClient,
        mesh: MeshView,
        outputs: OutputPool,
        metrics: GatewayMetrics,
        admission: RequestAdmission,
        resumable: ResumableRequests,
        *,
        default_timeout: float,
        most_urgent_priority: int = 0,
        max_request_values: int = DEFAULT_MAX_VALUES,
        tracer: Tracer | None = None,
        model: str = "",
        reasoning_marks: ReasoningMarks | None = None,
        random: Random,
        clock: Callable[[], int],
    ) -> None:
        """Args:
        most_urgent_priority: The lowest priority that a client gets, whatever it asks for.
        max_request_values: Limits ``n * max_tokens * (1 + logprobs)`` of a request.
        model: Its name in answers, logs and traces.
        reasoning_marks: The marks around the model's reasoning; None: they are not known.
        random: Draws the ids of requests, and the seeds of those that have none.
        clock: Returns nanoseconds.
        """
        self._random = random
        self._tracer = tracer
        self._model = model
        self._reasoning_marks = reasoning_marks
        self._preparer = Preparer(tokenizers, mesh, most_urgent_priority, random, clock, max_request_values)
        self._mesh = mesh
        self._outputs = outputs
        self._texts = BeamTexts(tokenizers)
        self._metrics = metrics
        self._admission = admission
        self._default_timeout = default_timeout
        self._resumable = resumable
        self._charges = Charges(lambda: asyncio.get_running_loop().time())

    @property
    def num_live(self) -> int:
        """Outputs that clients wait for."""
        return self._admission.num_live

    @property
    def mesh_load(self) -> MeshLoad:
        """The engines' load, as last reported."""
        return self._mesh.load()

    @asynccontextmanager
    async def open(
        self,
        job: GenerateRequest,
        trace_headers: Headers = NO_HEADERS,
        claim: ResumeToken = NEW,
        *,
        outlives_call: bool = True,
    ) -> AsyncIterator[RunningGeneration]:
        """Run a generation for the length of the ``async with``; cancel it at the end if it still runs.

        Args:
            trace_headers: Of the trace that the client has begun.
            claim: Which request of the mesh it is.
            outlives_call: Whether a request that can be resumed runs on when the call is cancelled, because its client
                may only have lost the connection. False: only a decision cancels the call.

        Raises any of :mod:`errors`; :class:`errors.DeadlineExceeded` covers the time of the body too.
        """
        if job.beam_search is not None and claim.fingerprint:
            raise errors.InvalidArgument("a beam search can be neither resumed nor repeated by a key", "beam_search")
        timeout = min(job.timeout or self._default_timeout, self._default_timeout)
        model = self._model if job.adapter is None else job.adapter.name
        tracing = nullcontext() if self._tracer is None else traced(self._tracer, job, trace_headers, model)
        with ExitStack() as held, tracing as trace:
            tenure = self._admit(job, claim, timeout)
            # Before anything is awaited: a call that is cancelled while its prompt is encoded must give its place back,
            # too.
            held.callback(tenure.end)
            try:
                async with asyncio.timeout(timeout) as limit:
                    is_search, tenant = job.beam_search is not None, job.tenant
                    generation = await self._begin(job, tenure.place, claim, model)
                    del job  # the client's texts, which may be large, must not live as long as its answer
                    held.callback(self._settle, tenure.place, generation, tenant)
                    if trace is not None:
                        trace.outcome = generation
                    is_kept = False
                    try:
                        if not is_search:
                            generation.submit(self._outputs, timeout=timeout)
                        else:
                            generation.search(self._outputs, self._texts, timeout=timeout)
                        if claim.fingerprint:
                            generation.charge = self._charges.of(tenant.name, generation.request_id, claim)
                            self._resumable.add(generation, tenant.name, tenure)
                        await asyncio.sleep(0)  # send it now: the answer is prepared while it is on its way
                        yield generation
                    except _CONNECTION_ENDED:
                        # A call that ran out of time is cancelled as well, but its client has had its answer: only a
                        # lost connection counts.
                        is_kept = outlives_call and not limit.expired() and self._resumable.abandon(generation, held)
                        raise
                    finally:
                        record_generation(generation)
                        if not is_kept:
                            self._resumable.remove(generation)
                            generation.close()
            except TimeoutError:
                raise errors.DeadlineExceeded(f"the request took longer than {timeout:g} s") from None

    def cancel(self, request_id: str, tenant: str) -> None:
        """End a request that its client can resume, at this gateway or any other one. It need not be known."""
        self._charges.forget(tenant, request_id)
        if not self._resumable.cancel(request_id, tenant):
            self._outputs.withdraw(request_id, tenant)

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

    def _admit(self, job: GenerateRequest, claim: ResumeToken, timeout: float) -> AdmittedCall:
        """Return the call's turn in the place of its request: that of a call without a client, or a new one. Raises as
        :meth:`RequestAdmission.admit`, and ``BodyChanged`` for a request that is known with another body."""
        before = self._resumable.find(claim, job.tenant.name) if claim.request_id else None
        if before is None:
            return AdmittedCall(self._admission.admit(job, timeout))
        self._admission.check_open()
        return before.succeed()

    async def _begin(
        self, job: GenerateRequest, place: AdmittedRequest, claim: ResumeToken, model: str
    ) -> RunningGeneration:
        """Prepare a request and reserve its tokens. ``model``: what generates, for answers."""
        prepared = await self._preparer.prepare(job)
        place.reserve_tokens(prepared.submits, is_bounded=job.sampling.HasField("max_tokens"))
        request_id = self._random.randbytes(16).hex()
        marks, begin = self._reasoning_marks, place.begin_output
        return RunningGeneration(prepared, request_id, self._metrics, marks, begin, claim, model=model)

    def _settle(self, place: AdmittedRequest, generation: RunningGeneration, tenant: Tenant) -> None:
        """Count what a call has used of its request, at its end."""
        used = generation.settle()
        place.num_used += used.num_tokens + generation.num_rejected_tokens
        self._metrics.observe_end(generation, tenant, used)
        self._charges.leave(tenant.name, generation.request_id, generation.charge, is_complete=generation.is_complete)
