"""Reports steps to operators: a log line for each one, a dump of one that failed, the steps of traced requests, and the
CPU time of requests and tenants."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from tokenloom.process.cpu_bill import MAX_TENANTS, OTHER, OVERHEAD, ProcessCpu

from ..data.config import ObservabilityConfig
from ..data.messages import EngineCoreOutput, SchedulerStats, StepSpan
from ..data.request import Request
from ..data.scheduler_output import ModelRunnerOutput, SchedulerOutput, WorkerTimes

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_SPANS = 32
"""Steps of each kind, prefill and decode, that are kept of a request."""


class StepObserver(Protocol):
    """Follows every step of one core. Steps end in the order in which they begin."""

    def begin(self) -> None:
        """Note that a planned step begins to compute."""

    def end(self, step: int, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Note that the oldest step, number ``step``, has its result, which is not applied yet."""

    def abandon(self) -> None:
        """Forget the steps in flight: they failed."""


class StepObservers:
    """Tells several observers."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self._observers = observers

    def begin(self) -> None:
        for each in self._observers:
            each.begin()

    def end(self, step: int, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for each in self._observers:
            each.end(step, scheduled, result)

    def abandon(self) -> None:
        for each in self._observers:
            each.abandon()


def as_observer(*observers: StepObserver | None) -> StepObserver | None:
    """Return one observer in place of those that exist; None if there is none."""
    found = [each for each in observers if each is not None]
    return StepObservers(found) if len(found) > 1 else next(iter(found), None)


class IterationLog:
    """Logs a line for each step of one core (vLLM's ``--enable-logging-iteration-details``)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self._started: deque[float] = deque()  # bounded by the steps that may be in flight

    def begin(self) -> None:
        self._started.append(self._clock())

    def end(self, step: int, scheduled: SchedulerOutput, result: ModelRunnerOutput | None = None) -> None:
        """Log the oldest step, number ``step``. A request decodes if the worker knows it and it computes one token, or
        one and its drafts."""
        milliseconds = (self._clock() - self._started.popleft()) * 1e3
        cached = scheduled.scheduled_cached_reqs
        num_scheduled = scheduled.num_scheduled_tokens
        drafts = scheduled.draft_token_ids
        decodes = [
            num_scheduled[r]
            for r in cached.req_ids
            if (num_scheduled[r] == 1 or r in drafts) and r not in cached.resumed_token_ids
        ]
        log.info(
            "Iteration(%d): %d context requests, %d context tokens, %d generation requests, %d generation tokens, "
            "iteration elapsed time: %.2f ms",
            step,
            len(num_scheduled) - len(decodes),
            scheduled.total_num_scheduled_tokens - sum(decodes),
            len(decodes),
            sum(decodes),
            milliseconds,
        )

    def abandon(self) -> None:
        """Forget the steps in flight: they failed."""
        self._started.clear()


class StepTraces:
    """Keeps steps of the requests that are traced, until these end. It exists only where spans have a receiver, so a
    core without one makes no call for it."""

    def __init__(self, requests: Mapping[str, Request], clock: Callable[[], int] = time.monotonic_ns) -> None:
        """``requests``: the live ones. ``clock`` returns nanoseconds."""
        self._requests = requests
        self._clock = clock
        self._traced: dict[str, _KeptSpans] = {}  # bounded by the live requests, see :meth:`add`
        self._schedule_ns = 0
        self._begun: deque[tuple[int, int]] = deque()  # bounded by the steps that may be in flight

    def timed(self, schedule: Callable[[], T]) -> Callable[[], T]:
        """Return a function that plans a step, and notes how long that takes."""

        def timed() -> T:
            before = self._clock()
            scheduled = schedule()
            self._schedule_ns = self._clock() - before
            return scheduled

        return timed

    def add(self, request_id: str) -> None:
        """Keep the steps of a request that was just added."""
        # Those that a client aborted end without an output.
        for gone in self._traced.keys() - self._requests.keys():
            del self._traced[gone]
        self._traced[request_id] = _KeptSpans()

    def begin(self) -> None:
        self._begun.append((self._clock(), self._schedule_ns))

    def end(self, step: int, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        began, schedule_ns = self._begun.popleft()
        if not self._traced:
            return
        times, ended, num_scheduled = result.times or WorkerTimes(0, 0), self._clock(), scheduled.num_scheduled_tokens
        for request_id, kept in self._traced.items():
            num_tokens, request = num_scheduled.get(request_id), self._requests.get(request_id)
            if num_tokens is None or request is None:
                continue
            # A request that lost its blocks, or that another engine began, computes its outputs with its prompt.
            decodes = request.num_output_tokens and (num_tokens == 1 or request_id in scheduled.draft_token_ids)
            span = StepSpan(
                not decodes,
                began,
                ended,
                schedule_ns,
                num_tokens,
                len(num_scheduled),
                scheduled.total_num_scheduled_tokens,
                times.forward_ns,
                times.sample_ns,
            )
            kept.add(span)

    def abandon(self) -> None:
        self._begun.clear()

    def take_ended(self, outputs: Iterable[EngineCoreOutput]) -> dict[str, list[StepSpan]]:
        """Return the steps of the traced requests that end with these outputs, and forget them."""
        if not self._traced:
            return {}
        ended = [each.request_id for each in outputs if each.finish_reason is not None]
        return {name: kept.spans() for name in ended if (kept := self._traced.pop(name, None)) is not None}


class _KeptSpans:
    """Keeps steps of one request, of many every second, fourth and so on: enough to see where its time went."""

    def __init__(self) -> None:
        self._prefill, self._decode = _Thinned(), _Thinned()

    def add(self, span: StepSpan) -> None:
        (self._prefill if span.is_prefill else self._decode).add(span)

    def spans(self) -> list[StepSpan]:
        return self._prefill.spans + self._decode.spans


class _Thinned:
    """Keeps every n-th of the spans that it gets, so that at most ``_MOST_SPANS`` are left."""

    def __init__(self) -> None:
        self.spans: list[StepSpan] = []
        self._every, self._count = 1, 0

    def add(self, span: StepSpan) -> None:
        if self._count % self._every == 0:
            if len(self.spans) == _MOST_SPANS:
                del self.spans[1::2]
                self._every *= 2
            if self._count % self._every == 0:
                self.spans.append(span)
        self._count += 1


_LEARNED = 0.1
"""How much the newest step counts in what a row, or a token, costs."""
_PROMPT_TOKENS = 8
"""A step of so many tokens for each of its requests shows what a token costs."""
_TOTALS_NS = 500_000_000
_MOST_ENDED = 1000


class StepBill:
    """Shares the CPU time of the core's processes out to the requests of each step. It exists with ``--bill`` only.

    A request pays for a row of the step, and for the tokens that it computes in it: what both cost follows from steps
    that decode only, and from those of prompts. Everything is in nanoseconds, and nothing is lost in rounding.
    """

    def __init__(
        self,
        requests: Mapping[str, Request],
        read_cpu: Callable[[], int] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``requests``: the live ones. ``read_cpu``: returns the CPU time of the core's processes so far; None: as the
        system has counted it. ``clock`` paces what :meth:`report` returns."""
        self._requests = requests
        self._read_cpu = read_cpu or ProcessCpu().read
        self._clock = clock
        # By request. Those that have ended stay for a while, because a step in flight may still compute a row for them.
        self._spent: dict[str, int] = {}  # bounded, see :meth:`add`
        self._tenants: dict[str, str] = {}  # of these requests; OTHER for those beyond the bound
        self._ended: dict[str, int] = {OVERHEAD: 0}  # by tenant
        self._cpu_ns = self._pool_ns = 0
        self._last: Mapping[str, int] = {}  # the tokens of the step that has ended last
        self._num_begun = 0  # and not ended
        self._is_idle = True  # nothing was to be computed since the last step
        self._of_row = self._of_token = 1.0
        self._sent_ns = 0

    def add(self, request_id: str, tenant: str) -> None:
        """Begin to bill a request that was added, or an input of a session."""
        if len(self._spent) > 2 * len(self._requests) + _MOST_ENDED:
            for gone in self._spent.keys() - self._requests.keys():
                self._ended[self._tenants.pop(gone)] += self._spent.pop(gone)
        if request_id not in self._spent:
            self._spent[request_id] = 0
            # Named for good: a counter of a tenant that is named only while few others live would fall.
            if tenant not in self._ended and len(self._ended) > MAX_TENANTS:
                tenant = OTHER
            self._tenants[request_id] = tenant
            self._ended.setdefault(tenant, 0)
        self._is_idle |= len(self._requests) <= 1 and not self._num_begun  # others may have been aborted

    def begin(self) -> None:
        # Where steps do not overlap, the time between two of them schedules requests and handles their results.
        if self._is_idle and not self._num_begun:
            self._collect()
            self._ended[OVERHEAD] += self._pool_ns
            self._pool_ns = 0
        self._is_idle = False
        self._num_begun += 1

    def end(self, step: int, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self._num_begun -= 1
        self._collect()
        self._last = scheduled.num_scheduled_tokens
        num_rows, num_tokens = len(self._last), scheduled.total_num_scheduled_tokens
        if num_tokens == num_rows:
            self._of_row += _LEARNED * (self._pool_ns / num_rows - self._of_row)
        elif num_tokens >= _PROMPT_TOKENS * num_rows:
            self._of_token += _LEARNED * (max(self._pool_ns / num_tokens, 1.0) - self._of_token)
        self._share_out()

    def abandon(self) -> None:
        self._num_begun = 0

    def report(self, outputs: Iterable[EngineCoreOutput]) -> dict[str, int]:
        """Write what requests have cost so far into their outputs. Returns what each tenant has, :data:`OVERHEAD`
        included: every half second, and when no request is left; otherwise nothing."""
        is_idle, now = not self._requests, self._clock()
        if is_idle and self._last:  # what was done with the results of the last step
            self._collect()
            self._share_out()
        self._is_idle |= is_idle
        spent = self._spent
        for output in outputs:
            if output.request_id in spent:
                output.cpu_ns = spent[output.request_id]
        if not is_idle and now - self._sent_ns < _TOTALS_NS:
            return {}
        self._sent_ns = now
        return self._totals()

    def _totals(self) -> dict[str, int]:
        totals = dict(self._ended)
        for request_id, nanoseconds in self._spent.items():
            totals[self._tenants[request_id]] += nanoseconds
        return totals

    def _collect(self) -> None:
        before, self._cpu_ns = self._cpu_ns, self._read_cpu()
        self._pool_ns += self._cpu_ns - before

    def _share_out(self) -> None:
        """Charge the requests of the last step for what was read and not shared out yet."""
        scheduled, spent = self._last, self._spent
        num_rows, num_tokens = len(scheduled), sum(scheduled.values())
        # In steps that decode only, a row and its token cost what a row costs here.
        row = max(self._of_row - self._of_token, 0.0)
        price = self._pool_ns / (row * num_rows + self._of_token * num_tokens)
        of_row, of_token = int(price * row), int(price * self._of_token)
        self._pool_ns -= of_row * num_rows + of_token * num_tokens
        for request_id, count in scheduled.items():  # without a call: this runs for each row of each step
            if request_id in spent:
                spent[request_id] += of_row + of_token * count
            else:  # it has ended long ago
                self._ended[OVERHEAD] += of_row + of_token * count


def dump_failed_step(
    config: ObservabilityConfig,
    error: BaseException,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    stats: SchedulerStats,
) -> None:
    """Write a failed step to the log and, if a directory is configured, to a file there. Never raises ``OSError``."""
    text = msgspec.json.encode(_describe_step(error, scheduled, requests, stats, tokens=config.dump_tokens))
    log.error("a step failed; the scheduler asked for: %s", text.decode())
    if not config.dump_dir:
        return
    try:
        (Path(config.dump_dir) / f"failed-step-{time.time_ns()}.json").write_bytes(text)
    except OSError as problem:
        log.error("the dump of a failed step cannot be written: %s", problem)


def _describe_step(
    error: BaseException,
    scheduled: SchedulerOutput,
    requests: Mapping[str, Request],
    stats: SchedulerStats,
    *,
    tokens: bool,
) -> dict[str, Any]:
    """Return the step as plain data. Without ``tokens`` it holds nothing of a prompt or an output."""
    cached = scheduled.scheduled_cached_reqs
    return {
        # The message of an error may quote a prompt, so it is left out together with the tokens.
        "error": f"{type(error).__name__}: {error}" if tokens else type(error).__name__,
        "num_scheduled_tokens": scheduled.num_scheduled_tokens,
        "new": [new.req_id for new in scheduled.scheduled_new_reqs],
        "resumed": list(cached.resumed_token_ids),
        "finished": scheduled.finished_req_ids,
        "preempted": scheduled.preempted_req_ids,
        "requests": {
            request_id: _describe(requests[request_id], tokens=tokens)
            for request_id in scheduled.num_scheduled_tokens
            if request_id in requests
        },
        "stats": msgspec.structs.asdict(stats),
    }


def _describe(request: Request, *, tokens: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "status": request.status.name,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": request.num_tokens,
        "num_computed_tokens": request.kv.num_computed_tokens,
        "num_output_placeholders": request.num_output_placeholders,
        "block_ids": request.kv.block_ids,
        "max_tokens": request.sampling_params.max_tokens,
        "temperature": request.sampling_params.temperature,
    }
    if tokens:
        described["token_ids"] = request.all_token_ids
    return described
