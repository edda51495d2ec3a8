"""Steps that the executor has begun and whose outputs the scheduler has not taken in yet, oldest first."""

import contextlib
from collections import deque
from typing import NamedTuple

from ..executor.executor import PendingOutput
from ..wire.scheduler_output import SchedulerOutput


class StepInFlight(NamedTuple):
    """A step, and what it is going to produce."""

    scheduled: SchedulerOutput
    pending: PendingOutput


class BatchQueue:
    """Bounded by what the executor can use: one step more would only wait there."""

    def __init__(self, max_concurrent_batches: int) -> None:
        self._max_size = max_concurrent_batches
        self.steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def is_full(self) -> bool:
        return len(self.steps) == self._max_size

    def put(self, scheduled: SchedulerOutput, pending: PendingOutput) -> None:
        assert not self.is_full
        self.steps.append(StepInFlight(scheduled, pending))

    def take_oldest(self) -> StepInFlight:
        return self.steps.popleft()

    def abandon(self) -> None:
        """Waits until no step is under way, whatever came of them."""
        while self.steps:
            with contextlib.suppress(Exception):  # the failure that matters is the one that is handled now
                self.steps.popleft().pending.result()
