"""Simulates a device for benchmarks: it only waits, and keeps its own time while the core does other work."""

import ctypes
import sys
import time
from collections.abc import Callable

from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from ..fake_workers.timed_worker import TimedWorker
from .uniproc import UniProcExecutor

_PR_SET_TIMERSLACK = 29


class TimedExecutor(UniProcExecutor):
    """Runs steps like a device with a queue: a step begins when it is submitted or when the step before it ends, and
    takes its configured time. Work of the core costs nothing while a step runs, and delays the next one otherwise."""

    def __init__(
        self,
        worker: TimedWorker,
        *,
        overlaps: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``overlaps`` allows a step to be submitted while one runs."""
        super().__init__(worker)
        self.max_concurrent_batches = 2 if overlaps else 1
        self._timed = worker
        self._clock = clock
        self._sleep = sleep
        self._ends_at = 0.0  # of the step submitted last
        _wake_in_time()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._ends_at = max(self._clock(), self._ends_at) + self._timed.seconds_of(scheduler_output)
        self._timed.begin(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        return _Due(self._timed.sample_tokens(grammar), self._ends_at, self._wait_until)

    def _wait_until(self, at: float) -> None:
        if (seconds := at - self._clock()) > 0:
            self._sleep(seconds)


class _Due:
    """Holds the output of a step until the time at which the step ends."""

    __slots__ = ("_at", "_output", "_wait_until")

    def __init__(self, output: ModelRunnerOutput, at: float, wait_until: Callable[[float], None]) -> None:
        self._output = output
        self._at = at
        self._wait_until = wait_until

    def result(self) -> ModelRunnerOutput:
        self._wait_until(self._at)
        return self._output


def _wake_in_time() -> None:
    """Let this thread wake up on time: by default Linux adds up to 50 µs to a sleep, to wake several at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
