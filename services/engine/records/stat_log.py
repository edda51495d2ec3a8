"""Statistics of an engine at intervals: the line that vLLM prints, and what else reads them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from tokenloom.engine_core.data.messages import EngineCoreOutputs, SchedulerStats
from tokenloom.process.plugins import load_all

log = logging.getLogger(__name__)

_WINDOW = 1000
"""Requests over which hit rates are taken, as in vLLM."""


@dataclass(frozen=True)
class DraftStats:
    """Describes the drafts of an interval."""

    num_drafts: int
    """Times that a request had drafts in a step."""
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: Sequence[int]
    """Accepted tokens by their place after the last known token."""


@dataclass(frozen=True)
class EngineStats:
    """Describes what an engine did in an interval, and its state at the end of it."""

    seconds: float
    """Length of the interval."""
    prompt_throughput: float
    """Tokens a second of prompts that were computed, cached ones included."""
    generation_throughput: float
    """Tokens a second that were generated."""
    num_running: int
    num_waiting: int
    num_preemptions: int
    kv_usage: float
    """Share of KV blocks in use, from 0 to 1."""
    prefix_hit_rate: float
    """Share of prompt tokens that the prefix cache had, from 0 to 1, over about the last thousand requests."""
    external_hit_rate: float | None
    """The same of other engines and of the offload tier; None: none was asked."""
    drafts: DraftStats | None
    """None: the engine has drafted nothing in the interval."""

    @property
    def is_idle(self) -> bool:
        """Return whether nothing was computed."""
        return not (self.prompt_throughput or self.generation_throughput)


class StatLogger(Protocol):
    """Gets the statistics of an engine at intervals."""

    def log(self, stats: EngineStats) -> None:
        """Take the statistics of an interval, on the thread that runs the engine: it must not wait."""


def plugged_loggers(plugins: Sequence[str]) -> list[StatLogger]:
    """Return the loggers of packages: objects, or classes without parameters. Raises ``ValueError`` for one that
    cannot be loaded."""
    found: list[StatLogger] = []
    for each in load_all("stat_loggers", plugins) if plugins else ():
        try:
            found.append(each.value() if isinstance(each.value, type) else each.value)
        except (Exception, SystemExit) as error:  # whatever the code of others does
            raise ValueError(f"the plugin {each.named} (stat_loggers): {type(error).__name__}: {error}") from error
    return found


class StatLine:
    """Logs a line for each interval, with vLLM's words; of several idle ones in a row only the first."""

    def __init__(self, engine: str) -> None:
        """``engine``: the number or name that the line begins with."""
        self._engine = engine
        self._was_idle = True

    def log(self, stats: EngineStats) -> None:
        was_idle, self._was_idle = self._was_idle, stats.is_idle and not stats.num_running
        if was_idle and self._was_idle:
            return
        log.info("Engine %s: %s", self._engine, ", ".join(_parts(stats)))
        if stats.drafts is not None:
            log.info("SpecDecoding metrics: %s", ", ".join(_draft_parts(stats.drafts, stats.seconds)))


def _parts(stats: EngineStats) -> list[str]:
    parts = [
        f"Avg prompt throughput: {stats.prompt_throughput:.1f} tokens/s",
        f"Avg generation throughput: {stats.generation_throughput:.1f} tokens/s",
        f"Running: {stats.num_running} reqs",
        f"Waiting: {stats.num_waiting} reqs",
        f"GPU KV cache usage: {100 * stats.kv_usage:.1f}%",
        f"Prefix cache hit rate: {100 * stats.prefix_hit_rate:.1f}%",
    ]
    if stats.num_preemptions:
        parts.insert(4, f"Preemptions: {stats.num_preemptions}")
    if stats.external_hit_rate is not None:
        parts.append(f"External prefix cache hit rate: {100 * stats.external_hit_rate:.1f}%")
    return parts


def _draft_parts(drafts: DraftStats, seconds: float) -> list[str]:
    shares = ", ".join(f"{count / drafts.num_drafts:.3f}" for count in drafts.accepted_per_position)
    return [
        f"Mean acceptance length: {1 + drafts.num_accepted_tokens / drafts.num_drafts:.2f}",
        f"Accepted throughput: {drafts.num_accepted_tokens / seconds:.2f} tokens/s",
        f"Drafted throughput: {drafts.num_draft_tokens / seconds:.2f} tokens/s",
        f"Accepted: {drafts.num_accepted_tokens} tokens",
        f"Drafted: {drafts.num_draft_tokens} tokens",
        f"Per-position acceptance rate: {shares}",
        f"Avg Draft acceptance rate: {100 * drafts.num_accepted_tokens / max(drafts.num_draft_tokens, 1):.1f}%",
    ]


class _Lookups(NamedTuple):
    """Counts since the start of the core: requests, and tokens that were looked for and found."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    external_queries: int = 0
    external_hits: int = 0


class StatIntervals:
    """Turns the counters of a core into statistics of intervals, and gives them to loggers. The core counts in any
    case, so its steps pay nothing for it."""

    def __init__(
        self, loggers: Sequence[StatLogger], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``seconds``: the least length of an interval that :meth:`observe` ends. ``clock`` returns seconds."""
        self._loggers = loggers
        self._seconds = seconds
        self._clock = clock
        self._begun = clock()
        self._before = SchedulerStats()
        self._generated_before = 0
        self._lookups = deque([_Lookups()])  # at the ends of intervals, bounded by the requests of the window
        self._latest = SchedulerStats()
        self._num_generated = 0
        self._has_steps = False  # in the interval, of those that :meth:`observe` took

    def observe(self, step: EngineCoreOutputs) -> None:
        """Take what a step brought, and end the interval if it is long enough."""
        now = self._clock()
        if not self._has_steps and now - self._begun >= self._seconds:
            self._begun = now  # nothing ran meanwhile: that time is no part of what begins now
        self._has_steps = True
        if step.scheduler_stats is not None:
            self._latest = step.scheduler_stats
        self._num_generated += sum(len(output.new_token_ids) for output in step.outputs)
        self.log_if_due()

    def seconds_left(self) -> float | None:
        """Return the seconds until an interval with steps is long enough; None: the interval has no step."""
        return max(0.0, self._begun + self._seconds - self._clock()) if self._has_steps else None

    def log_if_due(self) -> None:
        """End an interval with steps if it is long enough."""
        if self.seconds_left() == 0:
            self.log()

    def log(self) -> None:
        """End the interval with what :meth:`observe` took."""
        self.report(self._latest, self._num_generated)

    def report(self, stats: SchedulerStats, num_generated: int) -> None:
        """End the interval with the core's latest counters. ``num_generated``: tokens since the start of the core."""
        now = self._clock()
        measured = self._measure(stats, num_generated, max(now - self._begun, 1e-9))
        self._begun, self._before, self._generated_before = now, stats, num_generated
        self._has_steps = False
        for logger in self._loggers:
            try:
                logger.log(measured)
            except Exception:  # one that others wrote: the engine goes on
                log.exception("a logger of statistics failed")

    async def run(self, read: Callable[[], tuple[SchedulerStats, int]]) -> NoReturn:
        """End an interval whenever it is long enough, until cancelled. ``read`` returns the arguments of
        :meth:`report`."""
        while True:
            await asyncio.sleep(self._seconds)
            self.report(*read())

    def _measure(self, stats: SchedulerStats, num_generated: int, seconds: float) -> EngineStats:
        before = self._before
        found = self._look_up(stats)
        return EngineStats(
            seconds=seconds,
            prompt_throughput=(stats.num_prefilled_tokens - before.num_prefilled_tokens) / seconds,
            generation_throughput=(num_generated - self._generated_before) / seconds,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_preemptions=stats.num_preemptions - before.num_preemptions,
            kv_usage=stats.kv_usage,
            prefix_hit_rate=found.hits / max(found.queries, 1),
            external_hit_rate=found.external_hits / found.external_queries if found.external_queries else None,
            drafts=_drafts_between(before, stats),
        )

    def _look_up(self, stats: SchedulerStats) -> _Lookups:
        """Return the counts of the window that ends now."""
        ends = self._lookups
        now = _Lookups(
            stats.num_prefilled_requests,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
            stats.external_prefix_cache_queries,
            stats.external_prefix_cache_hits,
        )
        if now.requests != ends[-1].requests or len(ends) == 1:
            ends.append(now)
        while len(ends) > 2 and now.requests - ends[1].requests >= _WINDOW:
            ends.popleft()
        return _Lookups(*(last - first for first, last in zip(ends[0], now, strict=True)))


def _drafts_between(before: SchedulerStats, after: SchedulerStats) -> DraftStats | None:
    if (now := after.spec_decoding) is None:
        return None
    then = before.spec_decoding
    drafts = now.num_drafts - (then.num_drafts if then else 0)
    if not drafts:
        return None
    earlier = then.num_accepted_tokens_per_pos if then else [0] * len(now.num_accepted_tokens_per_pos)
    return DraftStats(
        drafts,
        now.num_draft_tokens - (then.num_draft_tokens if then else 0),
        now.num_accepted_tokens - (then.num_accepted_tokens if then else 0),
        [last - first for first, last in zip(earlier, now.num_accepted_tokens_per_pos, strict=True)],
    )
