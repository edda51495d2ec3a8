"""Runs the samples of one request, from its Submit to the end of the last one."""

import asyncio
from collections.abc import Callable, Iterable

from tokenloom.request import errors, wire_errors
from tokenloom.request.sampling_params import sample_seed
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.output_processor_pb2 import RequestFinished, SamplePosition, Submit
from tokenloom.v1.types_pb2 import FinishReason, SamplingParams

from ..placement.engine_link import EngineAttempt
from ..placement.engine_search import Lifetime
from ..placement.placement import FirstPick, Placer
from .outbox import Outbox
from .request_span import RequestSpan
from .request_stages import RequestStages
from .sample_output import SampleOutput

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
    ) -> None:
        self._submit = submit
        self._outputs = samples
        self._placer = placer
        self._trace = trace
        self._on_sample_end = on_sample_end
        self._on_end = on_end
        self._lifetime = Lifetime(submit, asyncio.get_running_loop().time())
        self._samples: list[RequestStages] = []
        for output in samples:
            index = output.sample_index
            params = submit.sampling_params if index == 0 else _params_of_later(submit, index)
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
    def request_id(self) -> str:
        return self._submit.request_id

    @property
    def tenant(self) -> str:
        return self._submit.tenant

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
    def is_complete(self) -> bool:
        """Whether all samples have ended as the client asked: with no error, and not cancelled."""
        ends = [output.finished for output in self._outputs]
        return all(end is not None and end.reason not in _UNWANTED for end in ends)

    @property
    def can_repeat(self) -> bool:
        """Whether all output so far can be sent again. The output of samples that had ended elsewhere is not here."""
        return len(self._outputs) == self.num_samples and all(output.can_repeat for output in self._outputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the request takes, about."""
        return _GROUP_BYTES + self._submit.ByteSize() + sum(output.num_kept_bytes for output in self._outputs)

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
            sample.begin_on(self._placer.share(attempt))

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


def _params_of_later(submit: Submit, index: int) -> SamplingParams:
    """Return the parameters of a sample after the first: its own seed, and no log probabilities of the prompt."""
    params = SamplingParams()
    params.CopyFrom(submit.sampling_params)
    params.seed = sample_seed(params.seed, index)
    # The prompt is the same for all samples, so its log probabilities are computed and sent once.
    params.ClearField("prompt_logprobs")
    return params
