"""Makes requests from Submits, and limits how many are live."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from tokenloom.request import errors
from tokenloom.request.limits import Reservation
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry.tracing import Tracer
from tokenloom.v1.output_processor_pb2 import RequestFinished, SampleJournal, Submit

from ..placement.placement import FirstPick, Placer
from ..text.vocabulary import Vocabulary
from .kept_requests import KeptRequests
from .metrics import OutputProcessorMetrics
from .outbox import Outbox
from .pooled_request import PooledRequest
from .request_span import RequestSpan
from .sample_group import SampleGroup
from .sample_output import SampleOutput

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
    size = _TOKEN_BYTES * len(prompt.token_ids)
    if prompt.embeds:
        size += sum(len(span.rows) for span in prompt.embeds)
    # Counting requests alone was not enough: 4,096 prompts of 32,000 tokens, far below --max-requests, fill the 512 MiB
    # of an output processor's container.
    return size * (1 + (submit.num_samples or 1))


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
        num_bytes = prompt_bytes(submit)
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
    limit every table and queue of this process."""

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
        if submit.take_over:
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
            return PooledRequest(submit, outbox, self._placer, tasks, trace, self._clock, ended)
        except BaseException:
            self._give_up(live)
            raise

    def make(self, submit: Submit, outbox: Outbox, tasks: Tasks, on_end: Callable[[int], object]) -> SampleGroup:
        """Return a request that has not started yet.

        Args:
            outbox: Receives its output.
            tasks: Own its placements, unless it may outlive the stream.
            on_end: Called with its slot, once, when its last sample has ended.

        Raises ``InvalidArgument`` for a Submit that names no sampling parameters or whose journals are not those of its
        samples, ``TryElsewhere`` when too many requests are live or this process drains.
        """
        if submit.WhichOneof("task") != "sampling_params":
            raise errors.InvalidArgument("sampling_params is missing", "sampling_params")
        self._limit.check(submit)
        self._placer.budget.add_request()
        count = submit.num_samples or 1
        journals = _journals(submit, count) if submit.journals else {}
        words, ends, clock = self._vocabulary, self._eos_token_ids, self._clock
        samples: list[SampleOutput] = []
        for index in range(count):
            journal = journals.get(index)
            if journal is None or not journal.finished:
                samples.append(SampleOutput(submit, words, ends, outbox, clock, sample_index=index, journal=journal))
        trace = RequestSpan.open(self._tracer, submit) if submit.trace_headers else None
        self._idle.clear()
        live = self._limit.take(submit, len(samples))
        try:
            owner = self.kept.tasks if submit.fingerprint else tasks
            group = SampleGroup(submit, samples, self._placer, owner, trace, partial(self._sample_ended, live), on_end)
            if submit.fingerprint:
                group.on_over = self.kept.ended
                self.kept.add(group)
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


def _journals(submit: Submit, count: int) -> dict[int, SampleJournal]:
    """Return the journals by sample. Raises ``InvalidArgument`` unless each is of another of ``count`` samples, and at
    least one sample is left to run."""
    journals = {journal.sample_index: journal for journal in submit.journals}
    if len(journals) < len(submit.journals) or max(journals) >= count:
        raise errors.InvalidArgument(f"the journals must be of different samples, below {count}", "journals")
    if sum(journal.finished for journal in journals.values()) == count:
        raise errors.InvalidArgument("the journals say that every sample has ended", "journals")
    return journals
