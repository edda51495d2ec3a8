"""Waits for the steps that an executor has begun."""

import contextlib
from collections import deque
from typing import NamedTuple

from ..data.scheduler_output import ModelRunnerOutput, PendingOutput, SchedulerOutput
from ..kv_transfer.kv_connector import StepTransfers


class StepInFlight(NamedTuple):
    """Holds a step that the executor has begun, with its KV transfers and its future result."""

    scheduled: SchedulerOutput
    transfers: StepTransfers | None
    pending: PendingOutput


def take_oldest(steps: deque[StepInFlight]) -> tuple[StepInFlight, ModelRunnerOutput]:
    """Wait for the oldest step, remove it and return it with its result. Raises the error of the step.

    The step stays if an interrupt ends the waiting, because it still runs.
    """
    oldest = steps[0]
    try:
        # Removed only afterwards: a step that was taken out first was lost when Ctrl-C arrived while its result was
        # awaited, and each later result was applied to the wrong step.
        result = oldest.pending.result()
    except Exception:
        steps.popleft()
        raise
    steps.popleft()
    return oldest, result


def drain(steps: deque[StepInFlight]) -> None:
    """Wait for all steps and drop their results and errors."""
    while steps:
        with contextlib.suppress(Exception):
            take_oldest(steps)
