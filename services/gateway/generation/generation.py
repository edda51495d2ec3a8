"""Runs a request, whichever API it came through: prepares it, submits it and collects its output."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from random import Random

from tokenloom.request import errors
from tokenloom.request.reasoning import ReasoningMarks
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, Tracer
from tokenloom.v1 import inference_pb2, output_processor_pb2, types_pb2

from ..mesh.collector import Collector, Delta, Outlet
from ..mesh.mesh_view import MeshLoad, MeshView
from ..mesh.output_pool import Cancel, OutputPool
from ..mesh.tokenizer_client import TokenizerClient
from ..metrics import GatewayMetrics, RequestWatch
from .admission import Admission, Place
from .beam_outputs import BeamTexts
from .beam_run import BeamRun
from .claim import NEW, Claim
from .job import Job
from .outputs_reasoning import OutputsReasoning
from .preparation import Prepared, Preparer
from .request_cost import DEFAULT_MAX_VALUES
from .request_trace import traced


class Generation:
    """Holds a request in work: its prompts, and the output so far.

    Output ``i`` is sample ``i % num_samples`` of prompt ``i // num_samples``.

    Attributes:
        request_id: Random, or made from the client's idempotency key; complete once the request was submitted.
        prompts: The token ids of each prompt.
        prompt_texts: The text of each prompt, when it is to be echoed.
        prompt_logprobs: By prompt, when asked for: complete with the first tokens of any sample.
        opens_reasoning: Whether the outputs begin within the model's reasoning.
        may_reason: Whether the outputs may begin with reasoning; False if the prompt has closed it, or if a constraint
            covers the whole output.
        reasoning: Counts reasoning tokens; None if the marks around the model's reasoning are not known.
        finished: By output, how it ended.
        completion_tokens: By output.
    """

    def __init__(
        self,
        prepared: Prepared,
        request_id: str,
        metrics: GatewayMetrics,
        reasoning_marks: ReasoningMarks | None = None,
        on_first_token: Callable[[], None] | None = None,
        claim: Claim = NEW,
    ) -> None:
        """``on_first_token``: called with the first token of each output."""
        self._claim = claim
        submits = prepared.submits
        self.request_id = request_id
        self.prompts: list[Sequence[int]] = list(map(_prompt_ids, submits))
        self.prompt_texts = prepared.prompt_texts
        self.prompt_logprobs: defaultdict[int, list[output_processor_pb2.SlotTextLogprobs]] = defaultdict(list)
        self.num_samples = submits[0].num_samples or 1
        self.num_outputs = len(submits) * self.num_samples
        self.reasoning: OutputsReasoning | None = None
        self.opens_reasoning, self.may_reason = prepared.opens_reasoning, not prepared.is_constrained_throughout
        if reasoning_marks is not None:
            self.reasoning = OutputsReasoning(reasoning_marks, self.prompts, self.num_samples)
            self.opens_reasoning |= self.reasoning.is_open
            self.may_reason &= not self.reasoning.is_over
        self.finished: dict[int, output_processor_pb2.RequestFinished] = {}
        self.completion_tokens = [0] * self.num_outputs
        self._submits, self._beams = submits, prepared.beams
        self._clock = prepared.clock
        self._started_ns, self._tokenize_ns = prepared.started_ns, prepared.tokenize_ns
        self._collector: Collector | BeamRun = Collector(self.num_outputs)
        self._cancels: list[Cancel] = []
        num_prompt_tokens = sum(map(len, self.prompts))
        self._watch = RequestWatch(metrics, num_prompt_tokens, self.num_outputs, prepared.started_ns, on_first_token)

    @property
    def done(self) -> bool:
        return self._collector.done

    @property
    def usage(self) -> inference_pb2.Usage:
        """The tokens of all prompts, so far."""
        return inference_pb2.Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(self.completion_tokens),
            cached_tokens=sum(
                finished.cached_tokens
                for index, finished in self.finished.items()
                if index % self.num_samples == 0  # the other samples hit what the first one computed
            ),
            reasoning_tokens=None if self.reasoning is None else self.reasoning.total,
        )

    @property
    def num_computed_tokens(self) -> int:
        """Output tokens that were computed so far, those of a search's rejected beams included."""
        run = self._collector
        return run.num_steps * self.num_outputs if isinstance(run, BeamRun) else sum(self.completion_tokens)

    @property
    def timeline(self) -> types_pb2.Timeline:
        """The times of the prompt that ended last, with the tokenizer's time."""
        timeline = types_pb2.Timeline(tokenize_ns=self._tokenize_ns)
        for finished in self.finished.values():
            timeline.MergeFrom(finished.timeline)
        return timeline

    @property
    def total_ns(self) -> int:
        """Nanoseconds since the gateway received the request."""
        return self._clock() - self._started_ns

    def prompt_of(self, index: int) -> Sequence[int]:
        """Return the prompt that an output continues."""
        return self.prompts[index // self.num_samples]

    def submit(self, pool: OutputPool, *, timeout: float) -> None:
        """Send every prompt to an output processor. ``timeout``: seconds for the whole request."""
        collector = self._collector
        assert isinstance(collector, Collector), "a beam search submits its steps itself"
        left_ns = max(self._started_ns + round(timeout * 1e9) - self._clock(), 0)
        submits, self._submits = self._submits, ()  # only the pool keeps them, within its budget
        claim = self._claim
        self.request_id = claim.request_id or pool.name(self.request_id)
        send = pool.resume if claim.resumes else pool.submit
        for index, submit in enumerate(submits):
            submit.request_id = self.request_id if len(submits) == 1 else f"{self.request_id}-{index}"
            submit.timeout.FromNanoseconds(left_ns)
            submit.fingerprint, submit.take_over = claim.fingerprint, claim.takes_over
            self._cancels.append(send(submit, collector, index * self.num_samples))

    def search(self, pool: OutputPool, texts: BeamTexts, *, timeout: float) -> None:
        """Search the outputs of every prompt with beams, while the caller takes them. ``timeout``: as in `submit`."""
        assert self._beams is not None
        deadline_ns = self._started_ns + round(timeout * 1e9)
        run = BeamRun(
            self._submits,
            self._beams,
            self.request_id,
            pool,
            texts,
            deadline_ns=deadline_ns,
            clock=self._clock,
        )
        self._collector = run
        self._cancels.append(run.cancel)

    async def take(self, outlet: Outlet | None = None) -> list[Delta]:
        """Wait for output and return at most one delta for each output. Raises what ended the request early.

        ``outlet``: as in :meth:`Collector.take`; it calls :meth:`count` for the deltas that it takes.
        """
        deltas = await self._collector.take(outlet)
        for delta in deltas:
            self.count(delta)
        return deltas

    def count(self, delta: Delta) -> None:
        """Record output that is on its way to the client."""
        self.completion_tokens[delta.index] += len(delta.token_ids)
        if self.reasoning is not None:
            self.reasoning.feed(delta.index, delta.token_ids)
        if delta.finished is not None:
            self.finished[delta.index] = delta.finished
        if delta.prompt_logprobs:
            self.prompt_logprobs[delta.index // self.num_samples] += delta.prompt_logprobs
        self._watch.output(delta)

    def leave(self) -> None:
        """End the call and leave its request running, for the client to resume through another gateway."""
        self._cancels.clear()
        assert isinstance(self._collector, Collector), "a beam search cannot be resumed"
        self._collector.fail(errors.GatewayLeaving("The gateway shuts down; resume the answer.", retry_after=0.0))

    def close(self) -> None:
        """Cancel what still runs."""
        for cancel in self._cancels:
            cancel()


def _prompt_ids(submit: output_processor_pb2.Submit) -> Sequence[int]:
    """Return the prompt's token ids, without a reference to its embeddings, which may be large."""
    token_ids = submit.prompt.token_ids
    return list(token_ids) if submit.prompt.embeds else token_ids


class Generator:
    """Admits requests and runs them."""

    def __init__(
        self,
        tokenizers: TokenizerClient,
        mesh: MeshView,
        outputs: OutputPool,
        metrics: GatewayMetrics,
        admission: Admission,
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
        model: Its name in traces.
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
        self._resumable: dict[Generation, None] = {}  # in order of arrival; bounded by what is admitted

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
        self, job: Job, trace_headers: Headers = NO_HEADERS, claim: Claim = NEW
    ) -> AsyncIterator[Generation]:
        """Run a generation for the length of the ``async with``; cancel it at the end if it still runs.

        Args:
            trace_headers: Of the trace that the client has begun.
            claim: Which request of the mesh it is.

        Raises any of :mod:`errors`; :class:`errors.DeadlineExceeded` covers the time of the body too.
        """
        if job.beam_search is not None and claim.fingerprint:
            raise errors.InvalidArgument("a beam search can be neither resumed nor repeated by a key", "beam_search")
        timeout = min(job.timeout or self._default_timeout, self._default_timeout)
        tracing = nullcontext() if self._tracer is None else traced(self._tracer, job, trace_headers, self._model)
        with self._admission.admit(job, timeout) as place, tracing as trace:
            try:
                async with asyncio.timeout(timeout):
                    is_search = job.beam_search is not None
                    generation = await self._begin(job, place, claim)
                    del job  # the client's texts, which may be large, must not live as long as its answer
                    if trace is not None:
                        trace.outcome = generation
                    try:
                        if not is_search:
                            generation.submit(self._outputs, timeout=timeout)
                        else:
                            generation.search(self._outputs, self._texts, timeout=timeout)
                        if claim.fingerprint:
                            self._resumable[generation] = None
                        await asyncio.sleep(0)  # send it now: the answer is prepared while it is on its way
                        yield generation
                    finally:
                        self._resumable.pop(generation, None)
                        generation.close()
                        place.num_output_tokens = generation.num_computed_tokens
            except TimeoutError:
                raise errors.DeadlineExceeded(f"the request took longer than {timeout:g} s") from None

    async def end_of_present(self) -> None:
        """Return when the generations that are open now have ended; new ones are still admitted."""
        await self._admission.end_of_present()

    def leave_resumable(self) -> None:
        """End the calls whose clients can continue through another gateway."""
        for generation in tuple(self._resumable):
            generation.leave()

    async def drain(self) -> None:
        """Refuse new generations, and return when none is open."""
        await self._admission.drain()

    async def _begin(self, job: Job, place: Place, claim: Claim) -> Generation:
        """Prepare a request and reserve its tokens."""
        prepared = await self._preparer.prepare(job)
        place.reserve_tokens(prepared.submits, is_bounded=job.sampling.HasField("max_tokens"))
        request_id = self._random.randbytes(16).hex()
        return Generation(prepared, request_id, self._metrics, self._reasoning_marks, place.begin_output, claim)
