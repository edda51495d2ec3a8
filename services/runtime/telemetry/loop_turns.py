"""Measures how long one turn of the event loop takes: while it runs, no other stream of this process is served."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, NoReturn

from prometheus_client import CollectorRegistry, Gauge

from . import fast_metrics

TURN_SECONDS: Final = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_PERIOD_SECONDS: Final = 0.001


class LoopTurns:
    """Wakes up every millisecond and observes the CPU time that this thread used between two wake-ups, in seconds.

    A wake-up comes in the first turn of the loop after its time, so what it observes is the longest turn since the one
    before, and at most one millisecond of shorter ones. CPU time is measured instead of time, because a process that
    waits for a core does nothing wrong.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock`` returns the CPU seconds of the calling thread."""
        self._clock = clock
        self._last: float | None = None
        self._longest = 0.0
        self._histogram = fast_metrics.Histogram(
            registry, "tokenloom_event_loop_turn_seconds", "CPU time of turns of the event loop.", {}, TURN_SECONDS
        )
        Gauge(
            "tokenloom_event_loop_longest_turn_seconds",
            "CPU time of the longest turn of the event loop.",
            registry=registry,
        ).set_function(lambda: self._longest)

    async def run(self) -> NoReturn:
        """Observe this event loop until cancelled."""
        while True:
            self.observe()
            await asyncio.sleep(_PERIOD_SECONDS)

    def observe(self) -> None:
        """Observe the CPU time since the last call; the first one only begins."""
        now = self._clock()
        if self._last is not None:
            seconds = now - self._last
            self._histogram.observe(seconds)
            self._longest = max(self._longest, seconds)
        self._last = now
