"""Makes requests from Submits, limits how many are live, and runs the samples of each."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from tokenloom.request import errors, wire_errors
from tokenloom.request.limits import Reservation
from tokenloom.request.packed_ids import num_ids
from tokenloom.request.sampling_params import sample_seed
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry.tracing import Tracer
from tokenloom.v1.output_processor_pb2 import (
    RecallResponse,
    RequestFinished,
    Resume,
    SampleJournal,
    SamplePosition,
    Submit,
)
from tokenloom.v1.types_pb2 import FinishReason, Prompt, SamplingParams

from ..placement.engine_link import EngineAttempt
from ..placement.engine_search import Lifetime
from ..placement.placement import FirstPick, Placer
from ..text.vocabulary import Vocabulary
from .kept_requests import KeptRequests, Peer, RequestKey
from .outbox import NOWHERE, Outbox
from .pooled_request import PooledRequest
from .request_stages import RequestStages
from .sample_output import SampleOutput
from .telemetry import OutputProcessorMetrics, RequestSpan

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

    from .request_recorder import RequestRecorder

_UNWANTED = (FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_ABORT)
_GROUP_BYTES = 4096
"""Memory of the objects of a request that has ended."""


class SampleGroup:
    """Runs the samples of one request.

    The first sample is placed like any request. When it has settled, the others are sent to the same engine and find
    the prompt in its prefix cache. If one engine does the whole request, they are sent in the same message as the first
    one; otherwise after the first token of the decode leg, so that one lease serves all.
    """

    def __init__(
        self,
        submit: Submit,
        samples: list[SampleOutput],
        placer: Placer,
        tasks: Tasks,
        trace: RequestSpan | None,
        on_sample_end: Callable[[RequestFinished], None],
        on_end: Callable[[int], object],
        ended: Iterable[SampleOutput] = (),
    ) -> None:
        """``ended``: samples that have ended at another output processor."""
        self._submit = submit
        self._outputs = sorted([*samples, *ended], key=attrgetter("sample_index"))
        self._placer = placer
        self._trace = trace
        self._on_sample_end = on_sample_end
        self._on_end = on_end
        self._lifetime = Lifetime(submit, asyncio.get_running_loop().time())
        self._samples: list[RequestStages] = []
        for output in samples:
            index = output.sample_index
            params = submit.sampling_params if index == 0 else params_of_later(submit, index)
            stages = RequestStages(submit, params, output, placer, tasks, self._sample_ended, self._lifetime)
            self._samples.append(stages)
        self._num_live = len(samples)
        self._first: RequestStages | None = None
        self._waiting: list[RequestStages] = []  # samples that begin when the first one has settled
        self._timer: asyncio.TimerHandle | None = None
        self.slot = submit.slot
        self.on_taken: Callable[[int], object] = _ignore
        self.on_over: Callable[[SampleGroup], object] = _ignore

    @property
    def key(self) -> RequestKey:
        return self._submit.tenant, self._submit.request_id

    @property
    def fingerprint(self) -> bytes:
        """Of the client's body; empty if the request ends with its stream."""
        return self._submit.fingerprint

    @property
    def num_samples(self) -> int:
        return self._submit.num_samples or 1

    @property
    def is_over(self) -> bool:
        """Whether all samples have ended."""
        return self._num_live == 0

    @property
    def has_tokens(self) -> bool:
        """Whether there is any output."""
        return any(output.token_ids for output in self._outputs)

    @property
    def is_complete(self) -> bool:
        """Whether all samples have ended as the client asked: with no error, and not cancelled."""
        ends = [output.finished for output in self._outputs]
        return all(end is not None and end.reason not in _UNWANTED for end in ends)

    @property
    def can_repeat(self) -> bool:
        """Whether all output so far can be sent again. The output of samples that had ended elsewhere is not here."""
        return len(self._outputs) == self.num_samples and all(output.can_repeat for output in self._outputs)

    def recall(self, *, with_prompt: bool) -> RecallResponse:
        """Return what it was begun with. ``with_prompt``: as of :func:`recalled`."""
        response, has_gateway = recalled(self._submit, with_prompt=with_prompt), self.on_taken is not _ignore
        response.is_attended = has_gateway and not self.is_over
        response.num_counted = len(self._outputs[0].token_ids) if has_gateway else 0
        return response

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the request takes, about."""
        return _GROUP_BYTES + self._submit.ByteSize() + sum(output.num_kept_bytes for output in self._outputs)

    def anew(self) -> Submit:
        """Return what computes the request again from its first token, with the weights that it began with."""
        submit = Submit()
        submit.CopyFrom(self._submit)
        submit.take_over, submit.num_prompt_logprobs = False, 0
        submit.engine_deaths = self._lifetime.num_deaths
        if (deadline := self._lifetime.deadline) is not None:
            left = deadline - asyncio.get_running_loop().time()
            submit.timeout.FromNanoseconds(max(round(left * 1e9), 0))
        del submit.journals[:]
        for output in self._outputs:
            submit.journals.add(sample_index=output.sample_index, weights=output.weights, numerics=output.numerics)
        return submit

    def give_up(self) -> None:
        """End without a word to the stream, except that another call continues the request."""
        self.on_taken(self.slot)
        self.detach()
        self.cancel()

    def detach(self) -> None:
        """Continue without a stream, because the gateway was lost."""
        self._on_end = self.on_taken = _ignore
        for output in self._outputs:
            output.detach()

    def attach(
        self,
        outbox: Outbox,
        slot: int,
        positions: Iterable[SamplePosition],
        on_end: Callable[[int], object],
        on_taken: Callable[[int], object],
    ) -> None:
        """Send the output from the positions on, and what follows, to another stream, and none to the one before.

        Args:
            on_end: Called with the slot, once, when the last sample ends; not if it has ended already.
            on_taken: Called with the slot when the request moves on to another stream.

        Raises ``InvalidArgument`` for a position that the output does not have. A fault of ours partway ends the
        request: the stream before has lost it already, and the new one is not going to hold it.
        """
        of_sample = {position.sample_index: position for position in positions}
        begin = SamplePosition()
        for output in self._outputs:
            output.check(of_sample.get(output.sample_index, begin))
        # The old stream gives the request up before the new one gets it: both may be streams of the same gateway.
        try:
            self.on_taken(self.slot)
            self.slot, self._on_end, self.on_taken = slot, on_end, on_taken
            for output in self._outputs:
                output.attach(outbox, slot, of_sample.get(output.sample_index, begin))
        except Exception:
            self.detach()
            self.cancel()
            raise

    def start(self, pick: FirstPick = None) -> None:
        """Start the first sample. ``pick``: what is known of its engine."""
        if self._lifetime.deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(self._lifetime.deadline, self._expire)
        live = self._samples
        if self._submit.journals:
            for sample in self._samples:
                sample.replay()  # which may end it
            live = [sample for sample in self._samples if not sample.ended]
        if live:
            first, *self._waiting = live
            self._first = first
            first.start(pick, on_settled=self._settled if self._waiting else None)

    def cancel(self) -> None:
        """End all samples, because the gateway wants no more output."""
        self._waiting.clear()
        for sample in self._samples:
            sample.cancel()

    def fail(self, error: BaseException) -> None:
        """End all samples that have not ended with an error."""
        self._waiting.clear()
        for sample in self._samples:
            sample.fail(error)

    def _settled(self, attempt: EngineAttempt) -> None:
        """Run the other samples on the engine of the first one."""
        waiting, self._waiting = self._waiting, []
        for sample in waiting:
            # The others are not placed: on this engine the prompt is in the prefix cache, and one lease serves all of
            # them.
            if sample.may_run_on(attempt):
                sample.begin_on(self._placer.share(attempt))
            else:
                sample.start()

    def _sample_ended(self, sample: RequestStages, finished: RequestFinished) -> None:
        self._num_live -= 1
        self._on_sample_end(finished)
        if self._trace is not None:
            self._trace.sample_ended(finished)
        if self._num_live == 0:
            self._end()
        elif sample is self._first and self._waiting:
            self._start_others(finished)

    def _start_others(self, first: RequestFinished) -> None:
        """Start the other samples, because the first one ended before it settled; or end them with its error."""
        waiting, self._waiting = self._waiting, []
        for sample in waiting:
            if first.reason == FinishReason.FINISH_REASON_ERROR:
                sample.fail(wire_errors.from_proto(first.error))
            else:
                sample.start()

    def _expire(self) -> None:
        self.fail(errors.DeadlineExceeded("The request's time ran out."))

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._trace is not None:
            self._trace.end()
        self._on_end(self.slot)
        self.on_over(self)
        # A request that is kept needs only its output. The samples hold this group: without references back to them,
        # they are freed at once.
        self._samples, self._first = [], None


def _ignore(_: object) -> None:
    """Do nothing."""


def recalled(submit: Submit, *, with_prompt: bool) -> RecallResponse:
    """Return what a request that no gateway has was begun with. ``with_prompt``: the tokens too, without embeddings,
    which may be larger than a message."""
    prompt = submit.prompt
    tokens = Prompt(token_ids=prompt.token_ids, packed_token_ids=prompt.packed_token_ids) if with_prompt else None
    return RecallResponse(recipe=submit.recipe, fingerprint=submit.fingerprint, prompt=tokens)


def params_of_later(submit: Submit, index: int) -> SamplingParams:
    """Return the parameters of a sample after the first: its own seed, and no log probabilities of the prompt."""
    params = SamplingParams()
    params.CopyFrom(submit.sampling_params)
    params.seed = sample_seed(params.seed, index)
    # The prompt is the same for all samples, so its log probabilities are computed and sent once.
    params.ClearField("prompt_logprobs")
    return params


_TOKEN_BYTES = 4
_LIMIT_SHARE = 0.5
"""Of the process's memory limit. The rest is for the program and the vocabulary, output, requests that are kept for
clients that return, and messages in transit."""
_DEFAULT_BYTES = 1 << 30
"""Without a memory limit: as on a host of one's own."""


def default_prompt_bytes(memory_limit: int | None) -> int:
    """Return the memory for the prompts of live requests, in bytes. ``memory_limit``: of the process; None: none."""
    return _DEFAULT_BYTES if memory_limit is None else int(memory_limit * _LIMIT_SHARE)


def prompt_bytes(submit: Submit) -> int:
    """Return the memory of a request's prompt while it is live, in bytes: that of its Submit, and of an ``AddRequest``
    for each sample, which waits while the engine does not read."""
    prompt = submit.prompt
    size = _TOKEN_BYTES * (len(prompt.token_ids) or num_ids(prompt))
    if prompt.embeds:
        size += sum(len(span.rows) for span in prompt.embeds)
    # Counting requests alone was not enough: 4,096 prompts of 32,000 tokens, far below --max-requests, fill the 512 MiB
    # of an output processor's container.
    return size * (1 + (submit.num_samples or 1)) + len(submit.recipe)


class LiveRequestLimit:
    """Bounds the requests that are live in this process, by number and by the memory of their prompts.

    Attributes:
        num_live: Samples that have not ended.
        num_bytes: Memory of the prompts of requests that have not ended.
        is_draining: Whether none is taken any more.
    """

    def __init__(self, max_requests: int, max_prompt_bytes: int) -> None:
        self.num_live = 0
        self.num_bytes = 0
        self.is_draining = False
        self._max_requests = max_requests
        self._max_prompt_bytes = max_prompt_bytes

    def check(self, submit: Submit) -> None:
        """Raise ``TryElsewhere`` if a request does not fit. One whose prompt alone is over the limit is taken while no
        other request is live: it would fit nowhere else either."""
        if self.is_draining:
            raise errors.TryElsewhere("The output processor is shutting down; retry.")
        if self.num_live + (submit.num_samples or 1) > self._max_requests:
            raise errors.TryElsewhere(f"The output processor already runs {self._max_requests} requests; retry.")
        if self.num_live and self.num_bytes + prompt_bytes(submit) > self._max_prompt_bytes:
            megabytes = self._max_prompt_bytes / (1 << 20)
            raise errors.TryElsewhere(f"The output processor's prompts already fill {megabytes:.3g} MiB; retry.")

    def take(self, submit: Submit, num_samples: int) -> Reservation:
        """Count a request of which so many samples run. :meth:`check` has decided. Each sample that ends releases one;
        with the last of them the memory of the prompt is given back too."""
        num_bytes = prompt_bytes(submit) if num_samples else 0
        self.num_live += num_samples
        self.num_bytes += num_bytes
        num_left = num_samples

        # It counts itself: if it read the amount of the reservation, the two would refer to each other, and the memory
        # of each request would wait for the garbage collector.
        def give_back(ended: int) -> None:
            nonlocal num_left
            num_left -= ended
            self.num_live -= ended
            if not num_left:
                self.num_bytes -= num_bytes

        return Reservation(give_back, num_samples)


class Requests:
    """Makes requests from Submits, and counts what they take up while they are live. The limits of this count also
    limit every table and queue of this process.

    Attributes:
        kept: The requests that can be resumed.
        recorder: Records those that end; None: none does.
        bill: Shares the CPU time of this process out to samples; None without ``--bill``.
    """

    def __init__(
        self,
        placer: Placer,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        metrics: OutputProcessorMetrics,
        *,
        limit: LiveRequestLimit,
        kept: KeptRequests[SampleGroup],
        tracer: Tracer | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Args:
        limit: Bounds the live requests.
        kept: Holds the requests that can be resumed.
        clock: Returns nanoseconds, by which the times of requests are measured.
        """
        self.kept = kept
        self.recorder: RequestRecorder | None = None
        self.bill: CpuBill | None = None
        self._clock = clock
        self._placer = placer
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._limit = limit
        self._tracer = tracer
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return self._limit.num_live

    def ask(self, submit: Submit) -> FirstPick:
        """Look for the engine of a request that is not made yet. Returns None when that has to wait, or when the
        request may be running already."""
        if submit.take_over or submit.HasField("kv_transfer"):
            return None
        if (attempt := self._placer.at_once(submit)) is not None:
            return attempt
        try:
            self._limit.check(submit)
        except errors.TryElsewhere:  # the request is about to be refused
            return None
        # Asked before the request is checked: checking and making it takes as long as the coordinator's answer. If it
        # is then refused, the pick counts for two seconds at an engine that never gets it.
        return self._placer.ask(submit)

    def make_pooled(
        self, submit: Submit, outbox: Outbox, tasks: Tasks, on_end: Callable[[int], object]
    ) -> PooledRequest:
        """Return a pooling request that has not started yet. The arguments and errors are as in :meth:`make`."""
        self._limit.check(submit)
        self._placer.budget.add_request()
        trace = RequestSpan.open(self._tracer, submit) if submit.trace_headers else None

        self._idle.clear()
        live = self._limit.take(submit, 1)

        def ended(slot: int, finished: RequestFinished) -> None:
            self._sample_ended(live, finished)
            on_end(slot)

        try:
            pooled = PooledRequest(submit, outbox, self._placer, tasks, trace, self._clock, ended)
            if self.bill is not None:
                pooled.account = self.bill.open(submit.tenant, pooled.work)
            return pooled
        except BaseException:
            self._give_up(live)
            raise

    def make(
        self,
        submit: Submit,
        outbox: Outbox,
        tasks: Tasks,
        on_end: Callable[[int], object],
        peer: Peer | None = None,
    ) -> SampleGroup:
        """Return a request that has not started yet.

        Args:
            outbox: Receives its output.
            tasks: Own its placements, unless it may outlive the stream.
            on_end: Called with its slot, once, when its last sample has ended.
            peer: The gateway that sends it.

        Raises ``InvalidArgument`` for a Submit that names no sampling parameters or whose journals are not those of its
        samples, ``TryElsewhere`` when too many requests are live or this process drains.
        """
        if submit.WhichOneof("task") != "sampling_params":
            raise errors.InvalidArgument("sampling_params is missing", "sampling_params")
        if submit.num_samples > 1 and submit.HasField("kv_transfer"):
            raise errors.InvalidArgument("kv_transfer is of one sample", "kv_transfer")
        try:
            self._limit.check(submit)
        except errors.TryElsewhere:
            # Its place may be taken by itself: its gateway had lost it, and submits it again.
            if not self.kept.make_way(submit.request_id, submit.tenant):
                raise
            self._limit.check(submit)
        self._placer.budget.add_request()
        journals = _journals(submit) if submit.journals else {}
        if sum(journal.finished for journal in journals.values()) == (submit.num_samples or 1):
            raise errors.InvalidArgument("the journals say that every sample has ended", "journals")
        return self._make(submit, journals, outbox, tasks, on_end, peer)

    def revive(self, wanted: Resume) -> SampleGroup | None:
        """Start a request of a lost gateway and a lost output processor from its copy, without a stream; return None if
        there is no copy. Raises as :meth:`KeptRequests.find`, and ``InvalidArgument`` for a copy that is of no request.
        """
        submit = self.kept.copies.take(wanted)
        return None if submit is None else self._continue(submit)

    def restart(self, wanted: Resume | Submit) -> SampleGroup | None:
        """Begin a request anew, without a stream, that runs here but whose output cannot be sent again: another output
        processor has sent its first log probabilities. Return None if there is none. Raises as :meth:`revive`."""
        if (group := self.kept.unrepeatable(wanted)) is None:
            return None
        submit = group.anew()
        group.give_up()
        return self._continue(submit)

    def _continue(self, submit: Submit) -> SampleGroup:
        """Start a request that some output processor had admitted, without a stream."""
        # Refused here for the number of those that run, no other part could continue it with the same seed and the
        # tokens that its client has.
        self._placer.budget.add_request()
        group = self._make(submit, _journals(submit), NOWHERE, self.kept.tasks, _ignore)
        if group.is_over:  # its client may not have all of it
            self.kept.ended(group)
            return group
        try:
            group.start()
        except Exception as error:  # as for a new request: it is known now
            group.fail(error)
        return group

    def _make(
        self,
        submit: Submit,
        journals: dict[int, SampleJournal],
        outbox: Outbox,
        tasks: Tasks,
        on_end: Callable[[int], object],
        peer: Peer | None = None,
    ) -> SampleGroup:
        """Make a request. ``journals``: what is known of its samples, by their numbers."""
        recorder = self.recorder if self.recorder is not None and self.recorder.takes(submit) else None
        words, ends, clock = self._vocabulary, self._eos_token_ids, self._clock
        samples: list[SampleOutput] = []
        ended: list[SampleOutput] = []
        for index in range(submit.num_samples or 1):
            journal = journals.get(index)
            if journal is not None and journal.finished:
                # Kept for a call that resumes the request, which may have nothing of it.
                if submit.fingerprint and journal.HasField("end"):
                    output = SampleOutput(submit, words, ends, NOWHERE, clock, sample_index=index, journal=journal)
                    output.ended_elsewhere(journal.end)
                    ended.append(output)
            else:
                sample = SampleOutput(
                    *(submit, words, ends, outbox, clock),
                    sample_index=index,
                    journal=journal,
                    trail=None if recorder is None else recorder.trail(),
                )
                samples.append(sample)
        trace = RequestSpan.open(self._tracer, submit) if submit.trace_headers else None
        if samples:
            self._idle.clear()
        live = self._limit.take(submit, len(samples))
        try:
            owner = self.kept.tasks if submit.fingerprint else tasks
            group = SampleGroup(
                submit, samples, self._placer, owner, trace, partial(self._sample_ended, live), on_end, ended
            )
            if submit.fingerprint:
                group.on_over = self.kept.ended
                self.kept.add(group, peer)
            if recorder is not None:
                group.on_over = recorder.follow(submit, samples, group.on_over)
            if self.bill is not None:
                for sample in samples:
                    sample.account = self.bill.open(submit.tenant, sample.work)
            return group
        except BaseException:
            self._give_up(live)
            raise

    async def drain(self) -> None:
        """Refuse new requests, and return when the live ones have ended."""
        self._limit.is_draining = True
        self.kept.hurry()
        await self._idle.wait()

    def _give_up(self, live: Reservation) -> None:
        """Give back what a request has taken that could not be made."""
        live.release()
        self._note_idle()

    def _sample_ended(self, live: Reservation, finished: RequestFinished) -> None:
        live.release(1)
        self._note_idle()
        self._metrics.ended(finished)

    def _note_idle(self) -> None:
        if not self._limit.num_live:
            self._idle.set()


def _journals(submit: Submit) -> dict[int, SampleJournal]:
    """Return the journals by sample. Raises ``InvalidArgument`` unless each is of another sample of the request."""
    count = submit.num_samples or 1
    journals = {journal.sample_index: journal for journal in submit.journals}
    if len(journals) < len(submit.journals) or max(journals, default=0) >= count:
        raise errors.InvalidArgument(f"the journals must be of different samples, below {count}", "journals")
    return journals
