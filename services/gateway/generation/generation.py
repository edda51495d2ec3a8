"""The road of a request, independent of the API that it came through: encode, check, submit, collect.

Leaving the ``async with`` of :meth:`Generator.open` cancels what still runs.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from operator import attrgetter

from tokenloom.request import errors, validation
from tokenloom.request.prompt_embeds import check_embeds
from tokenloom.services.runtime.telemetry.tracing import CURRENT, NO_HEADERS, Headers, Tracer
from tokenloom.v1 import inference_pb2, output_processor_pb2, tokenizer_pb2, types_pb2

from ..mesh.collector import Collector, Delta, Outlet
from ..mesh.mesh_view import MeshLoad, MeshView
from ..mesh.output_link import OutputPool, Ticket
from ..mesh.tokenizer_client import TokenizerClient
from ..metrics import GatewayMetrics, RequestWatch
from .job import Chat, Job
from .prompt_encoder import EncodedPrompt, PromptEncoder
from .request_trace import traced

MAX_PROMPTS = 1024
"""Limit on the prompts of one request."""


class Generation:
    """A request in work: its prompts, and the output so far.

    Output ``i`` is sample ``i % num_samples`` of prompt ``i // num_samples``.

    Attributes:
        request_id: Random; never the client's.
        prompts: The token ids of each prompt.
        prompt_texts: The text of each prompt, when it is to be echoed.
        prompt_logprobs: By prompt, when asked for: complete with the first tokens of any sample.
        opens_reasoning: Whether the outputs begin within the model's reasoning.
        finished: By output, how it ended.
        completion_tokens: By output.
    """

    def __init__(
        self,
        submits: Sequence[output_processor_pb2.Submit],
        started_ns: int,
        tokenize_ns: int,
        metrics: GatewayMetrics,
        prompt_texts: Sequence[str] = (),
        *,
        opens_reasoning: bool = False,
    ) -> None:
        self.request_id = secrets.token_hex(16)
        self.prompts: list[Sequence[int]] = list(map(attrgetter("prompt.token_ids"), submits))
        self.opens_reasoning = opens_reasoning
        self.prompt_texts = prompt_texts
        self.prompt_logprobs: defaultdict[int, list[output_processor_pb2.SlotTextLogprobs]] = defaultdict(list)
        self.num_samples = submits[0].num_samples or 1
        self.num_outputs = len(submits) * self.num_samples
        self.finished: dict[int, output_processor_pb2.RequestFinished] = {}
        self.completion_tokens = [0] * self.num_outputs
        self._submits = submits
        self._started_ns = started_ns
        self._tokenize_ns = tokenize_ns
        self._collector = Collector(self.num_outputs)
        self._tickets: list[Ticket] = []
        self._watch = RequestWatch(metrics, sum(map(len, self.prompts)), self.num_outputs, started_ns)

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
        )

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
        return time.monotonic_ns() - self._started_ns

    def prompt_of(self, index: int) -> Sequence[int]:
        """Return the prompt that an output continues."""
        return self.prompts[index // self.num_samples]

    def submit(self, pool: OutputPool, *, timeout: float) -> None:
        """Send every prompt to an output processor. ``timeout``: seconds for the whole request."""
        left_ns = max(self._started_ns + round(timeout * 1e9) - time.monotonic_ns(), 0)
        for index, submit in enumerate(self._submits):
            submit.request_id = self.request_id if len(self._submits) == 1 else f"{self.request_id}-{index}"
            submit.timeout.FromNanoseconds(left_ns)
            self._tickets.append(pool.submit(submit, self._collector, index * self.num_samples))

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
        if delta.finished is not None:
            self.finished[delta.index] = delta.finished
        if delta.prompt_logprobs:
            self.prompt_logprobs[delta.index // self.num_samples] += delta.prompt_logprobs
        self._watch.output(delta)

    def close(self) -> None:
        """Cancel what still runs."""
        for ticket in self._tickets:
            ticket.cancel()


class Generator:
    """Starts generations."""

    def __init__(
        self,
        tokenizers: TokenizerClient,
        mesh: MeshView,
        outputs: OutputPool,
        metrics: GatewayMetrics,
        *,
        max_live: int,
        default_timeout: float,
        most_urgent_priority: int = 0,
        tracer: Tracer | None = None,
        model: str = "",
    ) -> None:
        """Args:
        most_urgent_priority: The lowest priority that a client gets, whatever it asks for.
        model: Its name in traces.
        """
        self._tracer = tracer
        self._model = model
        self._tokenizers = tokenizers
        self._encoder = PromptEncoder(tokenizers)
        self._mesh = mesh
        self._outputs = outputs
        self._metrics = metrics
        self._max_live = max_live
        self._default_timeout = default_timeout
        self._most_urgent_priority = most_urgent_priority
        self._num_live = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Outputs that clients wait for."""
        return self._num_live

    @property
    def mesh_load(self) -> MeshLoad:
        """The engines' load, as last reported."""
        return self._mesh.load()

    @asynccontextmanager
    async def open(self, job: Job, trace_headers: Headers = NO_HEADERS) -> AsyncIterator[Generation]:
        """Run a generation for the length of the ``async with``; cancel it at the end if it still runs.

        ``trace_headers``: of the trace that the client has begun. Raises any of :mod:`errors`;
        :class:`errors.DeadlineExceeded` covers the time of the body too.
        """
        timeout = min(job.timeout or self._default_timeout, self._default_timeout)
        tracing = nullcontext() if self._tracer is None else traced(self._tracer, job, trace_headers, self._model)
        with self._admitted(_num_outputs(job)), tracing as trace:
            try:
                async with asyncio.timeout(timeout):
                    generation = await self._prepare(job)
                    if trace is not None:
                        trace.outcome = generation
                    try:
                        generation.submit(self._outputs, timeout=timeout)
                        await asyncio.sleep(0)  # send it now: the answer is prepared while it is on its way
                        yield generation
                    finally:
                        generation.close()
            except TimeoutError:
                raise errors.DeadlineExceeded(f"the request took longer than {timeout:g} s") from None

    async def drain(self) -> None:
        """Refuse new generations, and return when none is open."""
        self._draining = True
        await self._idle.wait()

    @contextmanager
    def _admitted(self, num_outputs: int) -> Iterator[None]:
        if self._draining:
            raise errors.Unavailable("the gateway is shutting down; retry")
        if self._num_live + num_outputs > self._max_live and self._num_live:
            raise errors.ResourceExhausted("too many requests are in work; retry later")
        self._num_live += num_outputs
        self._idle.clear()
        try:
            yield
        finally:
            self._num_live -= num_outputs
            if not self._num_live:
                self._idle.set()

    async def _prepare(self, job: Job) -> Generation:
        started_ns = time.monotonic_ns()
        info = self._tokenizers.info
        limits = self._mesh.limits(info.fingerprint) if info is not None else None
        if info is None or limits is None:
            raise errors.Unavailable("no engine is serving yet; retry")
        sampling = _resolve(job, info, limits)
        prompts = await self._encoder.encode(job, sampling, limits, info.max_token_bytes)
        if job.bad_words:
            await self._encoder.forbid(job.bad_words, sampling, limits)
        tokenize_ns = time.monotonic_ns() - started_ns
        priority = max(job.priority, self._most_urgent_priority) if job.priority else 0
        submits = []
        for prompt in prompts:
            submits.append(_submit(job, prompt, sampling, limits, info.default_sampling_params.max_tokens, priority))
        texts = await self._encoder.texts(job, [prompt.token_ids for prompt in prompts]) if job.echo else ()
        first = prompts[0]
        opens = isinstance(first, tokenizer_pb2.TokenizedPrompt) and first.opens_reasoning
        return Generation(submits, started_ns, tokenize_ns, self._metrics, texts, opens_reasoning=opens)


def _num_outputs(job: Job) -> int:
    """Return the number of outputs. Checked before anything is allocated for them."""
    num_prompts = 1 if isinstance(job.prompts, Chat) else len(job.prompts)
    if num_prompts > MAX_PROMPTS:
        field = job.prompt_field
        raise errors.InvalidArgument(f"{field} may hold at most {MAX_PROMPTS} prompts, not {num_prompts}", field)
    validation.check_samples(job.num_samples, num_prompts)
    return num_prompts * job.num_samples


def _resolve(
    job: Job, info: tokenizer_pb2.GetTokenizerInfoResponse, limits: types_pb2.ModelLimits
) -> types_pb2.SamplingParams:
    """Return the client's parameters over the model's defaults, checked, with a seed and the ids that end an output."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(info.default_sampling_params)
    sampling.ClearField("max_tokens")  # filled in when it is known how much room the prompt leaves
    sampling.MergeFrom(job.sampling)
    if job.text.stop:
        validation.check_text(job.text)
    validation.check_sampling(sampling, limits, job.num_samples)
    if job.priority:
        validation.check_priority(job.priority, limits)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    if not job.ignore_eos:
        for token_id in info.eos_token_ids:
            # A tokenizer may have more tokens than the model; such an id cannot be generated.
            if token_id < limits.vocab_size and token_id not in sampling.stop_token_ids:
                sampling.stop_token_ids.append(token_id)
    return sampling


def _submit(
    job: Job,
    prompt: EncodedPrompt,
    sampling: types_pb2.SamplingParams,
    limits: types_pb2.ModelLimits,
    default_max_tokens: int,
    priority: int,
) -> output_processor_pb2.Submit:
    """Return one prompt's request, checked; its ids and its timeout are filled in later."""
    submit = output_processor_pb2.Submit(
        prompt=prompt if isinstance(prompt, types_pb2.Prompt) else types_pb2.Prompt(token_ids=prompt.token_ids),
        # Hashes of token ids do not cover embeddings.
        block_hash_prefixes=() if isinstance(prompt, types_pb2.Prompt) else prompt.block_hash_prefixes,
        sampling_params=sampling,
        text=job.text,
        priority=priority,
        num_samples=job.num_samples if job.num_samples > 1 else 0,
        trace_headers=CURRENT.get(),
    )
    params = submit.sampling_params
    is_chat = isinstance(job.prompts, Chat)
    validation.fill_max_tokens(params, len(prompt.token_ids), limits, chat=is_chat, default=default_max_tokens)
    validation.check_prompt(prompt.token_ids, params, limits, field=job.prompt_field)
    if isinstance(prompt, types_pb2.Prompt):
        check_embeds(submit.prompt, params, limits)
    return submit
