"""The samples of one ``Submit``: placed together, computing their prompt once, ended together."""

import asyncio
import time
from collections.abc import Callable

from tokenloom.request import errors
from tokenloom.request.sample_seed import sample_seed
from tokenloom.services.runtime.host.tasks import Tasks
from tokenloom.v1.output_processor_pb2 import RequestFinished, Submit
from tokenloom.v1.types_pb2 import FinishReason, SamplingParams

from ..placement.placement import Asked, Placement, Placer
from ..stream.outbox import Outbox
from ..stream.paced_outbox import PacedOutbox
from ..text.vocabulary import Vocabulary
from .legs import Legs
from .live_request import LiveRequest
from .request_state import RequestState


class SampleGroup:
    """Sample 0 is placed like any request. Once it has settled, the others join it and find its prompt in that engine's
    prefix cache: at once when one engine does the whole request, in the same message; with the first token of the
    decode leg otherwise, so that one lease serves all.

    ``start`` it, once; ``on_end`` is called when its last sample ended.
    """

    def __init__(
        self,
        submit: Submit,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        outbox: Outbox,
        *,
        on_sample_end: Callable[[RequestFinished], None],
        on_end: Callable[[], object],
    ) -> None:
        """Raises what is wrong with the request's text options."""
        self._submit = submit
        self._on_sample_end = on_sample_end
        self._on_end = on_end
        interval = submit.text.stream_interval
        self._samples = [
            LiveRequest(
                (submit.slot, index),
                RequestState(submit, vocabulary, eos_token_ids, sample_index=index),
                PacedOutbox(outbox, interval) if interval > 1 else outbox,
                self._sample_ended,
            )
            for index in range(num_samples(submit))
        ]
        self._num_live = len(self._samples)
        self._waiting = self._samples[1:]  # for sample 0 to settle
        self._placer: Placer | None = None
        self._tasks: Tasks | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, placer: Placer, tasks: Tasks, asked: Asked | None = None) -> None:
        """Begins; tokens of earlier attempts first, which may already end it. ``tasks`` own the placements; ``asked``:
        for the engine of the first."""
        self._placer, self._tasks = placer, tasks
        if self._submit.HasField("timeout"):
            seconds = self._submit.timeout.ToNanoseconds() / 1e9
            self._deadline = time.monotonic() + seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        first = self._samples[0]
        first.replay()
        if not first.ended:
            first.start(self._legs(0), asked)

    def cancel(self) -> None:
        """The gateway wants no more of it."""
        self._waiting.clear()
        for live in self._samples:
            live.cancel()

    def _legs(self, index: int) -> Legs:
        assert self._placer is not None, "started before"
        assert self._tasks is not None, "started before"
        return Legs(
            self._submit,
            self._samples[index],
            self._placer,
            self._tasks,
            self._deadline,
            params=sample_params(self._submit, index),
            on_settled=self._settled if index == 0 and self._waiting else None,
        )

    def _settled(self, placement: Placement) -> None:
        """Sample 0 has an engine: the others join it."""
        assert self._placer is not None, "started before"
        waiting, self._waiting = self._waiting, []
        for live in waiting:
            live.join(self._legs(self._samples.index(live)), self._placer.share(placement))

    def _sample_ended(self, live: LiveRequest, finished: RequestFinished) -> None:
        self._num_live -= 1
        self._on_sample_end(finished)
        if self._num_live == 0:
            if self._timer is not None:
                self._timer.cancel()
            self._on_end()
        elif live is self._samples[0] and self._waiting:
            self._go_on(finished)

    def _go_on(self, first: RequestFinished) -> None:
        """Sample 0 ended before it settled: with its first token, or not at all well."""
        waiting, self._waiting = self._waiting, []
        for live in waiting:
            if first.reason == FinishReason.FINISH_REASON_ERROR:
                live.fail(errors.from_proto(first.error))
            else:
                live.start(self._legs(self._samples.index(live)))

    def _expire(self) -> None:
        self._waiting.clear()
        for live in self._samples:
            live.fail(errors.DeadlineExceeded("the request's time ran out"))


def num_samples(submit: Submit) -> int:
    """At least 1."""
    return submit.num_samples or 1


def sample_params(submit: Submit, index: int) -> SamplingParams:
    """Of one sample: its own seed; what is told of the prompt, sample 0 tells."""
    if index == 0:
        return submit.sampling_params
    params = SamplingParams()
    params.CopyFrom(submit.sampling_params)
    params.seed = sample_seed(params.seed, index)
    params.ClearField("prompt_logprobs")
    return params
