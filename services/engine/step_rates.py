"""Measures how long an engine's steps take and how many prompt tokens they complete. No I/O."""

import math
from typing import Final

from tokenloom.engine_core.wire.messages import SchedulerStats

_SECONDS: Final = 10.0
"""Time constant of both averages: what happened so long ago has lost 63 % of its weight."""


class StepRates:
    """Averages over the last ten seconds, whether requests wait or not.

    They say how much work arrives and how fast a batch goes; :class:`.QueueRates` says how much work would fit.
    """

    def __init__(self) -> None:
        self._at = self._step_seconds = self._step_requests = self._tokens = 0.0
        self._step = 0
        self._last = SchedulerStats()

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step that began with running requests; 0 before the first one."""
        return self._step_seconds

    @property
    def step_requests(self) -> float:
        """Mean running requests of those steps, weighted alike: a longer step and its larger batch belong together."""
        return self._step_requests

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
        if last.num_running and num_steps > 0:  # otherwise the engine was idle, or answered outside a step
            kept = kept if self._step_seconds else 0.0
            self._step_seconds = kept * self._step_seconds + (1 - kept) * seconds / num_steps
            self._step_requests = kept * self._step_requests + (1 - kept) * last.num_running

    def skip(self) -> None:
        """Leave out the time since the last step, because the engine was paused."""
        self._last = SchedulerStats(num_prefilled_tokens=self._last.num_prefilled_tokens)
