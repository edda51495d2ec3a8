"""Measures how long an engine's steps take and what they compute. No I/O."""

import math
from typing import Final

from tokenloom.engine_core.data.messages import SchedulerStats

_SECONDS: Final = 10.0
"""Time constant of the averages: what happened so long ago has lost 63 % of its weight."""
_LEAST_PROMPT_TOKENS: Final = 128
"""A step with fewer prompt tokens, or fewer than running requests, says little about how fast prompts are computed."""


class StepRates:
    """Averages over the last ten seconds, whether requests wait or not.

    They say how much work arrives and how fast steps are; :class:`.QueueRates` says how fast the queue moves.
    """

    def __init__(self) -> None:
        self._at = self._step_seconds = self._step_requests = 0.0
        self._tokens = 0.0  # of prompts
        self._prefill_seconds = self._prefill_tokens = 0.0  # of steps that mostly computed prompts
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
        kept = kept if self._step_seconds else 0.0
        self._step_seconds = kept * self._step_seconds + (1 - kept) * seconds / num_steps
        self._step_requests = kept * self._step_requests + (1 - kept) * last.num_running

    def skip(self) -> None:
        """Leave out the time since the last step, because the engine was paused."""
        last = self._last
        self._last = SchedulerStats(
            num_prefilled_tokens=last.num_prefilled_tokens,
            num_computed_tokens=last.num_computed_tokens,
        )
