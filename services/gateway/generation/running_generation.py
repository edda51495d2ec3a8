"""Holds a request in work: sends its prompts to output processors, counts its output, and measures its times."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tokenloom.request import errors, packed_ids
from tokenloom.request.reasoning import Reasoning, ReasoningMarks
from tokenloom.services.runtime.telemetry.tracing import CURRENT, trace_id_of
from tokenloom.v1 import inference_pb2, output_processor_pb2, types_pb2

from ..mesh.collector import Collector, Delta, Outlet
from ..mesh.output_pool import Cancel, OutputPool
from ..metrics.gateway_metrics import GatewayMetrics
from ..metrics.usage_counts import CallBill, Used
from ..records.request_ids import NEW, ResumeToken, seed_of
from .beam_run import BeamRun, BeamTexts
from .charge import Charge
from .past_turns import PastTurn
from .preparation import Prepared


class RunningGeneration:
    """Holds a request in work: its prompts, and the output so far.

    Output ``i`` is sample ``i % num_samples`` of prompt ``i // num_samples``.

    Attributes:
        model: Name of the model or adapter that generates.
        request_id: Random, or made from the client's idempotency key; complete once the request was submitted.
        prompts: The token ids of each prompt.
        prompt_texts: The text of each prompt, when it is to be echoed.
        prompt_logprobs: By prompt, when asked for: complete with the first tokens of any sample.
        opens_reasoning: Whether the outputs begin within the model's reasoning.
        may_reason: Whether the outputs may begin with reasoning; False if the prompt has closed it, or if a constraint
            covers the whole output.
        stop_token_ids: The tokens that end an output, those of the model included.
        reasoning: Counts reasoning tokens; None if the marks around the model's reasoning are not known.
        finished: By output, how it ended.
        completion_tokens: By output.
        charge: What was counted of the request, by all its calls; None: nothing yet, and no other call can have it.
        turn: How the prompt differs from the turn before it; None: it is no turn of a conversation.
        bill: What the call costs; None without ``--bill``.
    """

    def __init__(
        self,
        prepared: Prepared,
        request_id: str,
        metrics: GatewayMetrics,
        reasoning_marks: ReasoningMarks | None = None,
        on_first_token: Callable[[int], None] | None = None,
        token: ResumeToken = NEW,
        *,
        model: str = "",
    ) -> None:
        """``on_first_token``: called with the index of each output that has its first token."""
        self.model = model
        self._token = token
        submits = prepared.submits
        self.request_id = request_id
        self.prompts: list[Sequence[int]] = []
        self._max_tokens: list[int] = []
        for submit in submits:
            token_ids = submit.prompt.token_ids or packed_ids.ids_of(submit.prompt)
            # A copy beside embeddings: a reference would keep them, and they may be large.
            self.prompts.append(list(token_ids) if submit.prompt.embeds else token_ids)
            self._max_tokens.append(submit.sampling_params.max_tokens)
        self.prompt_texts = prepared.prompt_texts
        self.prompt_logprobs: defaultdict[int, list[output_processor_pb2.SlotTextLogprobs]] = defaultdict(list)
        self.num_samples = submits[0].num_samples or 1
        self.stop_token_ids = tuple(submits[0].sampling_params.stop_token_ids)
        self.num_outputs = len(submits) * self.num_samples
        self.reasoning: OutputsReasoning | None = None
        self.opens_reasoning, self.may_reason = prepared.opens_reasoning, not prepared.is_constrained_throughout
        if reasoning_marks is not None:
            self.reasoning = OutputsReasoning(reasoning_marks, submits, self.num_samples)
            self.opens_reasoning |= self.reasoning.is_open
            self.may_reason &= not self.reasoning.is_over
            is_constrained = submits[0].sampling_params.HasField("structured_outputs")
            self._is_bound_later = self.may_reason and is_constrained
        self.finished: dict[int, output_processor_pb2.RequestFinished] = {}
        self.completion_tokens = [0] * self.num_outputs
        self.charge: Charge | None = None
        self.bill: CallBill | None = None
        self.turn = prepared.turn
        self._submits, self._beams = submits, prepared.beams
        self._has_seed = prepared.has_seed
        self._media = prepared.media
        self._num_audio_tokens = 0 if prepared.media is None else sum(map(_num_audio_tokens, submits))
        self._clock = prepared.clock
        self._started_ns, self._tokenize_ns = prepared.started_ns, prepared.tokenize_ns
        self._collector: Collector | BeamRun = Collector(self.num_outputs)
        self._cancels: list[Cancel] = []
        self._watch = RequestWatch(
            metrics, prepared.num_prompt_tokens, self.num_outputs, prepared.started_ns, on_first_token
        )

    @property
    def done(self) -> bool:
        return self._collector.done

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have ended as the client asked: with no error, and not cancelled."""
        return self.done and all(
            finished.reason != types_pb2.FINISH_REASON_ABORT for finished in self.finished.values()
        )

    @property
    def usage(self) -> inference_pb2.Usage:
        """The tokens of all prompts, so far."""
        usage = inference_pb2.Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(self.completion_tokens),
            cached_tokens=sum(
                finished.cached_tokens
                for index, finished in self.finished.items()
                if index % self.num_samples == 0  # the other samples hit what the first one computed
            ),
            reasoning_tokens=None if self.reasoning is None else self.reasoning.total,
            audio_tokens=self._num_audio_tokens,
        )
        if self.turn is not None and self.finished:
            if (miss := self.turn.miss(self.finished[0])) is not None:
                usage.cache_miss.CopyFrom(miss)
            if self.turn.is_kept:
                usage.cache_write_tokens = self.turn.num_written(usage.cached_tokens)
        if self.bill is not None:
            cpu = self._cpu(self.bill)
            usage.cpu_ns = cpu.gateway_ns + cpu.tokenizer_ns + cpu.output_processor_ns + cpu.engine_ns
        return usage

    @property
    def ended_turn(self) -> PastTurn | None:
        """The turn with its answer; None: it has none, or the request is no turn of a conversation."""
        collector = self._collector
        if self.turn is None or not self.finished or not isinstance(collector, Collector):
            return None
        num_reasoning = 0 if self.reasoning is None else self.reasoning.total
        return self.turn.ended(self.request_id, collector.token_ids(0), self.finished[0], num_reasoning)

    @property
    def fingerprint(self) -> bytes:
        """Of the client's body; empty if no other call may resume or repeat the request."""
        return self._token.fingerprint

    @property
    def takes_over(self) -> bool:
        """Whether it runs a request that another call may have begun, or begins it."""
        return self._token.takes_over

    def settle(self) -> Used:
        """Count the output so far, and return what no other call of the request has counted."""
        usage = self.usage
        if self.charge is None:
            self.charge = Charge()
        return self.charge.add(usage.prompt_tokens, usage.cached_tokens, self.completion_tokens)

    def trust(self, num_tokens: int) -> None:
        """Believe of no more tokens that they were counted elsewhere: the client has no more of the only output,
        whatever it has said."""
        if self.charge is not None:
            self.charge.trust(replace(self._token, num_delivered=(num_tokens,)))

    @property
    def num_rejected_tokens(self) -> int:
        """Tokens that were computed for the beams that a search has rejected."""
        run = self._collector
        return run.num_steps * self.num_outputs - sum(self.completion_tokens) if isinstance(run, BeamRun) else 0

    @property
    def ttft_seconds(self) -> float | None:
        """From the arrival of the request to its first token; None: it has none yet."""
        return self._watch.ttft_seconds

    @property
    def timeline(self) -> types_pb2.Timeline:
        """The times of the prompt that ended last, with the tokenizer's time."""
        # One message for what several parts have measured: the output processor fills it in, and only the tokenizer's
        # time is known here.
        timeline = types_pb2.Timeline(tokenize_ns=self._tokenize_ns)
        for finished in self.finished.values():
            timeline.MergeFrom(finished.timeline)
        if self.bill is not None:
            timeline.cpu.CopyFrom(self._cpu(self.bill))
        return timeline

    def _cpu(self, bill: CallBill) -> types_pb2.CpuTimes:
        """Return what the request has cost so far: this call, and the outputs that have ended."""
        ended = [finished.timeline.cpu for finished in self.finished.values()]
        return types_pb2.CpuTimes(
            gateway_ns=bill.charge(),
            tokenizer_ns=bill.tokenizer_ns,
            output_processor_ns=sum(each.output_processor_ns for each in ended),
            engine_ns=sum(each.engine_ns for each in ended),
        )

    @property
    def total_ns(self) -> int:
        """Nanoseconds since the gateway received the request."""
        return self._clock() - self._started_ns

    def max_tokens_of(self, index: int) -> int:
        """Return the limit of an output's tokens."""
        return self._max_tokens[index // self.num_samples]

    def prompt_of(self, index: int) -> Sequence[int]:
        """Return the prompt that an output continues."""
        return self.prompts[index // self.num_samples]

    def submit(self, pool: OutputPool, *, timeout: float) -> None:
        """Send every prompt to an output processor. ``timeout``: seconds for the whole request."""
        collector = self._collector
        assert isinstance(collector, Collector), "a beam search submits its steps itself"
        left_ns = max(self._started_ns + round(timeout * 1e9) - self._clock(), 0)
        submits, self._submits = self._submits, ()  # only the pool keeps them, within its budget
        token = self._token
        self.request_id = token.request_id or pool.name(self.request_id)
        send = pool.submit
        if token.resumes:
            send = partial(pool.resume, may_begin=not any(token.num_delivered))
        for index, submit in enumerate(submits):
            submit.request_id = self.request_id if len(submits) == 1 else f"{self.request_id}-{index}"
            submit.timeout.FromNanoseconds(left_ns)
            submit.fingerprint, submit.take_over = token.fingerprint, token.takes_over
            if token.fingerprint and not self._has_seed:
                # The same at each gateway that continues it: drawn anew, the rest would be that of another answer.
                submit.sampling_params.seed = seed_of(self.request_id)
            if token.recipe:
                submit.recipe = token.recipe
            self._cancels.append(send(submit, collector, index * self.num_samples, self._media))

    def search(self, pool: OutputPool, texts: BeamTexts, *, timeout: float) -> None:
        """Search the outputs of every prompt with beams, while the caller takes them. ``timeout``: as in `submit`."""
        assert self._beams is not None
        deadline_ns = self._started_ns + round(timeout * 1e9)
        # Two calls with one key may search at the same time: the requests of their steps have ids of their own.
        name, self.request_id = self.request_id, self._token.request_id or pool.name(self.request_id)
        run = BeamRun(
            self._submits,
            self._beams,
            name,
            pool,
            texts,
            deadline_ns=deadline_ns,
            clock=self._clock,
            media=self._media,
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
            if delta.finished is not None and self._is_bound_later:
                self._mark_unfinished(delta.index, delta.finished)
        if delta.finished is not None:
            self.finished[delta.index] = delta.finished
        if delta.prompt_logprobs:
            self.prompt_logprobs[delta.index // self.num_samples] += delta.prompt_logprobs
        self._watch.output(delta)

    def _mark_unfinished(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """Say of an output that ended before its constraint began that it is cut off."""
        assert self.reasoning is not None
        by_itself = finished.reason == types_pb2.FINISH_REASON_STOP and not finished.stop_reason
        if self.reasoning.lacks_answer(index, has_ended_by_itself=by_itself):
            finished.reason = types_pb2.FINISH_REASON_LENGTH

    def fail(self, error: errors.TokenloomError) -> None:
        """End the call with an error. Not for a beam search."""
        assert isinstance(self._collector, Collector), "a beam search ends with its call"
        self._collector.fail(error)

    def supersede(self) -> None:
        """Let the call end instead of sending its request again, because a later call runs it."""
        assert isinstance(self._collector, Collector), "a beam search ends with its call"
        self._collector.is_superseded = True

    def abandon(self) -> None:
        """Go on without a client, which may come back."""
        assert isinstance(self._collector, Collector), "a beam search ends with its call"
        self._collector.is_unattended = True

    def leave(self) -> None:
        """End the call and leave its request running, for the client to resume through another gateway."""
        self._cancels.clear()
        self.fail(errors.GatewayLeaving("The gateway shuts down; resume the answer.", retry_after=0.0))

    def close(self) -> None:
        """Cancel what still runs."""
        for cancel in self._cancels:
            cancel()


def _num_audio_tokens(submit: output_processor_pb2.Submit) -> int:
    """Return how many tokens of a prompt stand for sounds."""
    sounds = (item for item in submit.prompt.media if item.kind == types_pb2.MEDIA_KIND_AUDIO)
    return sum(run.num_tokens for item in sounds for run in item.runs)


class OutputsReasoning:
    """Follows the reasoning of each output by its tokens.

    Attributes:
        is_open, is_over: Whether the first prompt leaves the reasoning open, or has closed it.
    """

    def __init__(self, marks: ReasoningMarks, submits: Sequence[output_processor_pb2.Submit], num_samples: int) -> None:
        """The first ``num_samples`` outputs continue the prompt of the first submit, and so on."""
        prompts = [submit.prompt for submit in submits]
        of_prompts = [
            Reasoning(marks, prompt.token_ids or packed_ids.ids_of(prompt), prompt.reasoning_start)
            for prompt in prompts
        ]
        self.is_open, self.is_over = of_prompts[0].is_inside, of_prompts[0].is_over
        self._of_outputs = [each.copy() for each in of_prompts for _ in range(num_samples)]

    def feed(self, index: int, token_ids: Sequence[int]) -> None:
        """Follow new tokens of an output."""
        self._of_outputs[index].feed(token_ids)

    def lacks_answer(self, index: int, *, has_ended_by_itself: bool) -> bool:
        """Return whether an output has ended before its constraint began, as :meth:`Reasoning.lacks_answer` says."""
        return self._of_outputs[index].lacks_answer(has_ended_by_itself=has_ended_by_itself)

    def num_tokens(self, index: int) -> int:
        """Return the reasoning tokens of an output so far."""
        return self._of_outputs[index].num_tokens

    @property
    def total(self) -> int:
        """The reasoning tokens of all outputs so far."""
        return sum(each.num_tokens for each in self._of_outputs)


class RequestWatch:
    """Measures one request: counts its tokens and observes its times. In a request that is traced, the times carry the
    id of its trace.

    Attributes:
        ttft_seconds: From the arrival to the first token; None: the request has none yet.
    """

    def __init__(
        self,
        gateway: GatewayMetrics,
        num_prompt_tokens: int,
        num_outputs: int,
        started_ns: int,
        on_first_token: Callable[[int], None] | None = None,
    ) -> None:
        """``on_first_token``: called with the index of each output that has its first token."""
        gateway.prompt_tokens.inc(num_prompt_tokens)
        self._on_first_token = on_first_token
        self._gateway = gateway
        self._started = started_ns
        headers = CURRENT.get()
        self._trace_id = trace_id_of(headers) if headers else ""
        self.ttft_seconds: float | None = None
        self._last = [0] * num_outputs  # when each output had its last tokens; 0: none yet

    def output(self, delta: Delta) -> None:
        """Record output that is on its way to the client."""
        now = time.monotonic_ns()
        if delta.token_ids:
            if last := self._last[delta.index]:
                self._gateway.inter_token_latency.observe((now - last) / 1e9)
            else:
                ttft = (now - self._started) / 1e9
                self._gateway.time_to_first_token.observe_traced(ttft, self._trace_id)
                if self.ttft_seconds is None:
                    self.ttft_seconds = ttft
                if self._on_first_token is not None:
                    self._on_first_token(delta.index)
            self._last[delta.index] = now
            self._gateway.generation_tokens.inc(len(delta.token_ids))
        if delta.finished is not None:
            self._gateway.e2e_latency.observe_traced((now - self._started) / 1e9, self._trace_id)
            self._gateway.success[delta.finished.reason].inc()
            self._gateway.kv_flow.add(delta.finished)
