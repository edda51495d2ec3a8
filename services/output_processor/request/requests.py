"""Makes requests from Submits, and limits how many are live."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tokenloom.request import errors
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry.tracing import Tracer
from tokenloom.v1.output_processor_pb2 import RequestFinished, SampleJournal, Submit

from ..placement.placement import PendingPick, Placer
from ..text.vocabulary import Vocabulary
from .kept_requests import KeptRequests
from .live_request import LiveRequest, LiveRequestLimit, num_samples
from .metrics import OutputProcessorMetrics
from .outbox import Outbox
from .pooled_request import PooledRequest
from .request_span import RequestSpan
from .sample_group import SampleGroup
from .sample_output import SampleOutput


class Requests:
    """Makes requests from Submits, and counts what they take up while they are live. The limits of this count also
    limit every table and queue of this process."""

    def __init__(
        self,
        placer: Placer,
        vocabulary: Vocabulary,
        eos_token_ids: frozenset[int],
        metrics: OutputProcessorMetrics,
        *,
        room: LiveRequestLimit,
        kept: KeptRequests[SampleGroup],
        tracer: Tracer | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Args:
        room: Bounds the live requests.
        kept: Holds the requests that can be resumed.
        clock: Returns nanoseconds, by which the times of requests are measured.
        """
        self.kept = kept
        self._clock = clock
        self._placer = placer
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._room = room
        self._tracer = tracer
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return self._room.num_live

    def ask(self, submit: Submit) -> PendingPick | None:
        """Ask the coordinator for the engine of a request that is not made yet. Returns None when that has to wait, or
        when the request may be running already."""
        if submit.take_over:
            return None
        try:
            self._check(submit)
        except errors.TryElsewhere:  # the request is about to be refused
            return None
        # Asked before the request is checked: checking and making it takes as long as the coordinator's answer. If it
        # is then refused, the pick counts for two seconds at an engine that never gets it.
        return self._placer.ask(submit)

    def make_pooled(
        self, submit: Submit, outbox: Outbox, tasks: Tasks, on_end: Callable[[int], object]
    ) -> PooledRequest:
        """Return a pooling request that has not started yet. The arguments and errors are as in :meth:`make`."""
        self._check(submit)
        self._placer.budget.add_request()
        trace = RequestSpan.open(self._tracer, submit) if submit.trace_headers else None

        def ended(slot: int, finished: RequestFinished) -> None:
            self._sample_ended(place, finished)
            on_end(slot)

        with self._taken(submit, 1) as place:
            return PooledRequest(submit, outbox, self._placer, tasks, trace, self._clock, ended)

    def make(self, submit: Submit, outbox: Outbox, tasks: Tasks, on_end: Callable[[int], object]) -> SampleGroup:
        """Return a request that has not started yet.

        Args:
            outbox: Receives its output.
            tasks: Own its placements, unless it may outlive the stream.
            on_end: Called with its slot, once, when its last sample has ended.

        Raises ``InvalidArgument`` for a Submit that names no sampling parameters or whose journals are not those of its
        samples, ``TryElsewhere`` when too many requests are live or this process drains.
        """
        count = num_samples(submit)
        if submit.WhichOneof("task") != "sampling_params":
            raise errors.InvalidArgument("sampling_params is missing", "sampling_params")
        self._check(submit)
        self._placer.budget.add_request()
        journals = _journals(submit, count) if submit.journals else {}
        samples = [
            SampleOutput(
                submit,
                self._vocabulary,
                self._eos_token_ids,
                outbox,
                self._clock,
                sample_index=index,
                journal=journals.get(index),
            )
            for index in range(count)
            if index not in journals or not journals[index].finished
        ]
        count = len(samples)
        trace = RequestSpan.open(self._tracer, submit) if submit.trace_headers else None
        with self._taken(submit, count) as place:
            ended = partial(self._sample_ended, place)
            if not submit.fingerprint:
                return SampleGroup(submit, samples, self._placer, tasks, trace, ended, on_end)
            group = SampleGroup(submit, samples, self._placer, self.kept.tasks, trace, ended, on_end)
            group.on_over = self.kept.ended
            self.kept.add(group)
            return group

    async def drain(self) -> None:
        """Refuse new requests, and return when the live ones have ended."""
        self._draining = True
        self.kept.hurry()
        await self._idle.wait()

    def _check(self, submit: Submit) -> None:
        if self._draining:
            raise errors.TryElsewhere("The output processor is shutting down; retry.")
        self._room.check(submit)

    @contextmanager
    def _taken(self, submit: Submit, count: int) -> Iterator[LiveRequest]:
        """Take the place of a request that is made in the ``with`` block; give it back if that fails."""
        self._idle.clear()
        place = self._room.take(submit, count)
        try:
            yield place
        except BaseException:
            place.close()
            self._note_idle()
            raise

    def _sample_ended(self, place: LiveRequest, finished: RequestFinished) -> None:
        place.end_sample()
        self._note_idle()
        self._metrics.ended(finished)

    def _note_idle(self) -> None:
        if not self._room.num_live:
            self._idle.set()


def _journals(submit: Submit, count: int) -> dict[int, SampleJournal]:
    """Return the journals by sample. Raises ``InvalidArgument`` unless each is of another of ``count`` samples, and at
    least one sample is left to run."""
    journals = {journal.sample_index: journal for journal in submit.journals}
    if len(journals) < len(submit.journals) or max(journals) >= count:
        raise errors.InvalidArgument(f"the journals must be of different samples, below {count}", "journals")
    if sum(journal.finished for journal in journals.values()) == count:
        raise errors.InvalidArgument("the journals say that every sample has ended", "journals")
    return journals
