"""Tracks how busy the engine is, how fast its queue moves and how long its steps take; decides whether it accepts
another request. No I/O."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tokenloom.engine_core.data.lora import LoraState
from tokenloom.engine_core.data.messages import EngineCoreOutputs, GroupState, SchedulerStats
from tokenloom.request.errors import ResourceExhausted, TryElsewhere
from tokenloom.v1 import coordinator_pb2, engine_pb2

_HALF_LIFE_SECONDS: Final = 5.0
_HALF_LIFE_REQUESTS: Final = 32.0
_LEAST_SECONDS: Final = 0.2
_FULL_KV_USAGE: Final = 0.9


class DecayedRate:
    """Averages events per second over the last intervals that were measured.

    Old intervals lose half of their weight after 5 s of measured time in which 32 requests began, or more slowly if
    fewer began: an engine whose requests run for a minute is measured over several minutes, and a batch whose requests
    all end together does not make the rate jump. Time that is not measured changes nothing.
    """

    def __init__(self) -> None:
        self._seconds = self._events = 0.0
        self.per_second = 0.0
        """Events per second; 0 before the first event, or if too little was measured."""

    def add(self, seconds: float, events: int, num_requests: int) -> None:
        """Add an interval. ``num_requests``: requests that began in it, which may differ from the events."""
        if num_requests:
            decay = 0.5 ** min(seconds / _HALF_LIFE_SECONDS, num_requests / _HALF_LIFE_REQUESTS)
            self._seconds *= decay
            self._events *= decay
        self._seconds += seconds
        self._events += events
        self.per_second = self._events / self._seconds if self._seconds >= _LEAST_SECONDS else 0.0


class QueueRates:
    """Measures, while requests wait, how fast they leave the queue, and what they wait for.

    Requests wait for a seat when the batch or the KV cache is full; then requests per second are measured. Otherwise
    they wait because the prompts before them take the whole budget of a step; then prompt tokens per second are
    measured. Time in which no request waits shows what clients send, not what the engine can do, and is not measured.

    Attributes:
        seats: Requests that may run at the same time.
    """

    def __init__(self, max_num_seqs: int) -> None:
        """``max_num_seqs``: requests in the largest batch."""
        self.seats = max_num_seqs
        self._max_num_seqs = max_num_seqs
        self._last = SchedulerStats()
        self._at = 0.0
        self._prefill = DecayedRate()
        self._starts = DecayedRate()
        self.prefill_tokens_per_second = 0.0
        """Prompt tokens that are computed per second while only compute limits the queue; 0: not known."""
        self.starts_per_second = 0.0
        """Requests that begin per second while they wait for seats; 0: not known."""

    def observe(self, stats: SchedulerStats, now: float) -> None:
        """Take the statistics of a step. ``now``: seconds of a monotonic clock."""
        last, self._last = self._last, stats
        seconds, self._at = now - self._at, now
        if not stats.num_waiting:
            self.seats = self._max_num_seqs
            return
        is_kv_full = stats.kv_usage >= _FULL_KV_USAGE
        # With a full KV cache the batch cannot grow, so what runs now is what can run, whatever --max-num-seqs says.
        self.seats = max(stats.num_running, 1) if is_kv_full else self._max_num_seqs
        # The interval began with an empty queue, so it measures in part how clients send.
        if not last.num_waiting:
            return
        num_begun = stats.num_prefilled_requests - last.num_prefilled_requests
        if stats.num_running >= self.seats:
            self._starts.add(seconds, num_begun, num_begun)
            self.starts_per_second = self._starts.per_second
        else:
            self._prefill.add(seconds, stats.num_prefilled_tokens - last.num_prefilled_tokens, num_begun)
            self.prefill_tokens_per_second = self._prefill.per_second

    def skip(self) -> None:
        """Leave out the time since the last step, because the engine was paused."""
        self._last = SchedulerStats()


_SECONDS: Final = 10.0
"""Time constant of the averages: what happened so long ago has lost 63 % of its weight."""
_LEAST_PROMPT_TOKENS: Final = 128
"""A step with fewer prompt tokens, or fewer than running requests, says little about how fast prompts are computed."""


class StepRates:
    """Averages over the last ten seconds, whether requests wait or not.

    They say how much work arrives and how fast steps are; :class:`.QueueRates` says how fast the queue moves.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self.step_seconds = 0.0
        """Mean seconds of a step that began with running requests; 0 before the first one."""
        self.step_requests = 0.0
        """Mean running requests of those steps, weighted alike: a longer step and its larger batch belong together."""
        self._tokens = 0.0  # of prompts
        self._prefill_seconds = self._prefill_tokens = 0.0  # of steps that mostly computed prompts
        self._step = 0
        self._last = SchedulerStats()

    @property
    def computed_tokens_per_second(self) -> float:
        """Prompt tokens that are computed per second in steps that mostly compute prompts; 0 before the first one."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def prompt_tokens_per_second(self, now: float) -> float:
        """Prompt tokens whose prefill ended, cached ones included, per second of all time; 0: fewer than one, so that
        the reports of an idle engine do not change for ever. ``now``: as in ``observe``."""
        rate = self._tokens * math.exp((self._at - now) / _SECONDS) / _SECONDS
        return rate if rate >= 1 else 0.0

    def observe(self, stats: SchedulerStats, step: int, now: float) -> None:
        """Take the statistics of the step with this number. ``now``: seconds of a monotonic clock."""
        last, self._last = self._last, stats
        seconds, self._at = now - self._at, now
        num_steps, self._step = step - self._step, step
        kept = math.exp(-seconds / _SECONDS)
        self._tokens = self._tokens * kept + stats.num_prefilled_tokens - last.num_prefilled_tokens
        if not last.num_running or num_steps <= 0:  # the engine was idle, or answered outside a step
            return
        num_prompt_tokens = stats.num_computed_tokens - last.num_computed_tokens - num_steps * last.num_running
        # A rate over all steps would mix in those that mostly decode, and make an engine with long outputs look slow at
        # prompts.
        if num_prompt_tokens >= num_steps * max(_LEAST_PROMPT_TOKENS, last.num_running):
            self._prefill_seconds = self._prefill_seconds * kept + seconds
            self._prefill_tokens = self._prefill_tokens * kept + num_prompt_tokens
        kept = kept if self.step_seconds else 0.0
        self.step_seconds = kept * self.step_seconds + (1 - kept) * seconds / num_steps
        self.step_requests = kept * self.step_requests + (1 - kept) * last.num_running

    def skip(self) -> None:
        """Leave out the time since the last step, because the engine was paused."""
        last = self._last
        self._last = SchedulerStats(
            num_prefilled_tokens=last.num_prefilled_tokens,
            num_computed_tokens=last.num_computed_tokens,
        )


RELIEF_SECONDS: Final = 0.3
"""From a report that blocks are short until the first request has left: a tick of the coordinator, and the copy."""
_MOVE_STEPS: Final = 8
"""For so many steps a request goes on while its blocks are copied."""
_LEAST_STEP_SECONDS: Final = 0.005
"""Of an engine whose steps are not measured yet, or so short that blocks are gone before any request could move."""

MAX_PICKS = 4096
"""Bound of the picks to acknowledge; the newest are kept. A coordinator ignores picks made before it started."""


class Load(NamedTuple):
    """Holds the counts of an ``EngineReport``."""

    waiting: int
    running: int
    waiting_tokens: int
    kv_usage: float
    free_kv_blocks: int
    step: int
    seats: int
    prefill_tokens_per_second: float
    starts_per_second: float
    computed_tokens_per_second: float
    prefilling_tokens: int
    prompt_tokens_per_second: float
    step_seconds: float
    step_requests: float


class LoadTracker:
    """Combines the requests that the front accepted with the core's latest statistics. A request counts as waiting from
    its acceptance until it runs.

    Attributes:
        changed: Set when the counts may have changed; cleared when they are reported.
        num_live: Requests that were accepted and have not ended.
        is_paused: Whether an operator has paused the engine.
        is_failing: Whether the last health check of the workers failed.
        stats: The core's latest statistics.
        loras: The LoRA adapters that are loaded, by name.
        step: Steps that the core has executed.
        group: The state of its data-parallel group; None: it belongs to none.
        urgent: Set when a change must be reported at once; cleared when it is reported.
        progress: How far the engine is with the state that operators want.
        is_short: Whether its KV blocks will soon not suffice for the requests that run, if that is watched.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``max_num_seqs``: requests in the largest batch. ``max_waiting``: a bound of memory, for requests beyond the
        batch. ``clock``: seconds."""
        self.changed = asyncio.Event()
        self.num_live = 0
        self.is_paused = False
        self.is_failing = False
        self.stats = SchedulerStats()
        self.step = 0
        self.loras: list[LoraState] = []
        self.group: GroupState | None = None
        self.urgent = asyncio.Event()
        self.progress = coordinator_pb2.StateProgress()
        self.is_short = False
        self._block_size = 0  # 0: no coordinator asks whether blocks are short
        self._max_live = max_num_seqs + max_waiting
        self._clock = clock
        self._rates = QueueRates(max_num_seqs)
        self._steps = StepRates()
        self._refusal = ""
        self._picks: deque[engine_pb2.PickId] = deque(maxlen=MAX_PICKS)
        self._waiters: list[asyncio.Future[None]] = []  # a drain, a change of role and the like
        self._num_covered = 0
        # Prompt tokens of live requests that the core's statistics do not cover yet.
        self._uncovered: deque[int] = deque()

    def started(self, num_blocks: int) -> None:
        """Note that the core is up, with all its blocks free."""
        self.stats = SchedulerStats(num_free_blocks=num_blocks)

    def set_loras(self, loras: list[LoraState]) -> None:
        """Note which LoRA adapters are loaded."""
        old, self.loras = self.loras, loras
        if [(each.name, each.digest, each.pinned) for each in old] != [
            (each.name, each.digest, each.pinned) for each in loras
        ]:
            self.changed.set()

    def set_group(self, group: GroupState) -> None:
        """Note a change of the data-parallel group. Other ranks wait for it."""
        self.group = group
        self.urgent.set()
        self.changed.set()
        self._wake()

    def set_paused(self, is_paused: bool) -> None:
        """Note that a pause began or ended."""
        self.is_paused = is_paused
        self._rates.skip()
        self._steps.skip()
        self.changed.set()

    def set_progress(self, progress: coordinator_pb2.StateProgress) -> None:
        """Note how far the engine is with the state that operators want. They wait for it."""
        self.progress = progress
        self.urgent.set()
        self.changed.set()

    def set_failing(self, is_failing: bool) -> None:
        """Note the result of a health check."""
        self.is_failing = is_failing
        self.changed.set()

    def refuse_new(self, reason: str) -> None:
        """Refuse every new request from now on: TRY_ELSEWHERE with ``reason``."""
        self._refusal = reason

    def admit(self, add: engine_pb2.AddRequest) -> None:
        """Check that the engine accepts a request, and record the coordinator's pick in any case.

        Raises ``TryElsewhere`` or ``ResourceExhausted``.
        """
        # Recorded before the checks: a pick whose request is refused has arrived too, and must not count for two
        # seconds more.
        if add.HasField("pick"):
            self._picks.append(add.pick)
            self.changed.set()
        if self._refusal:
            raise TryElsewhere(self._refusal)
        if self.num_live >= self._max_live:
            raise ResourceExhausted(f"the engine is full: it has {self.num_live} requests (max_num_seqs + max_waiting)")

    def accepted(self) -> None:
        """Count a request that was accepted."""
        self.num_live += 1
        self.changed.set()

    def handed_over(self, num_prompt_tokens: int) -> None:
        """Count an accepted request that was sent to the core."""
        self._uncovered.append(num_prompt_tokens)

    def ended(self) -> None:
        """Count an accepted request that was answered or dropped."""
        self.num_live -= 1
        self.changed.set()
        self._wake()

    def observe(self, outputs: EngineCoreOutputs) -> None:
        """Take the statistics of a step's outputs."""
        self.step = max(self.step, outputs.step)
        if outputs.group is not None:
            self.set_group(outputs.group)
        # The core's statistics are of the end of its step. What the front has sent since then is not in them, and a
        # burst would look like an empty queue until the next step.
        while self._num_covered < outputs.num_requests_added:
            self._num_covered += 1
            # A request whose sender was cancelled in the middle of its message reaches the core uncounted. Each of them
            # made one later request look covered for good, and the report said too few waiting tokens.
            if self._uncovered:
                self._uncovered.popleft()
        if (stats := outputs.scheduler_stats) is not None:
            old, self.stats = self.stats, stats
            now = self._clock()
            self._rates.observe(stats, now)
            self._steps.observe(stats, self.step, now)
            if stats.loras is not None:
                self.set_loras(stats.loras)
            if (old.num_waiting, old.num_running) != (stats.num_waiting, stats.num_running):
                self.changed.set()
            if self._block_size:
                self._look_at_blocks(stats)
            self._wake()

    def watch_blocks(self, block_size: int) -> None:
        """Report from now on when KV blocks, of ``block_size`` tokens, are short."""
        self._block_size = block_size

    def _look_at_blocks(self, stats: SchedulerStats) -> None:
        """Note whether the free blocks last for as long as it takes to move a request."""
        num_steps = _MOVE_STEPS + RELIEF_SECONDS / max(self._steps.step_seconds, _LEAST_STEP_SECONDS)
        reserve = stats.num_running * math.ceil(num_steps / self._block_size)
        reserve += stats.num_prefilling_tokens // self._block_size
        was_short, self.is_short = self.is_short, stats.num_running > 1 and stats.num_free_blocks < reserve
        if self.is_short:
            self.changed.set()
        if self.is_short and not was_short:
            self.urgent.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` returns true. It is called whenever a request ends or the core sends statistics."""
        while not holds():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def snapshot(self) -> Load:
        """Return the present counts."""
        stats = self.stats
        # The core's number is older than the front's: requests that the front has ended are still in it.
        running = min(stats.num_running, self.num_live)
        return Load(
            waiting=self.num_live - running,
            running=running,
            waiting_tokens=stats.num_waiting_tokens + sum(self._uncovered),
            kv_usage=stats.kv_usage,
            free_kv_blocks=stats.num_free_blocks,
            step=self.step,
            seats=self._rates.seats,
            prefill_tokens_per_second=self._rates.prefill_tokens_per_second,
            starts_per_second=self._rates.starts_per_second,
            computed_tokens_per_second=self._steps.computed_tokens_per_second,
            prefilling_tokens=stats.num_prefilling_tokens,
            prompt_tokens_per_second=self._steps.prompt_tokens_per_second(self._clock()),
            step_seconds=self._steps.step_seconds,
            step_requests=self._steps.step_requests,
        )

    def take_picks(self) -> list[engine_pb2.PickId]:
        """Return the coordinator's picks that arrived since the last call."""
        picks = list(self._picks)
        self._picks.clear()
        return picks

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
