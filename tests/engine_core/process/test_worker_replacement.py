"""Tests when workers are replaced, and when their core ends instead."""

from typing import cast

import pytest

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.errors import ExecutorFailedError, WorkerLostError
from tokenloom.engine_core.process.core_process import AGAIN_SECONDS, WorkerReplacement

LOST = WorkerLostError("worker 0 ended with status -9")


class FakeCore:
    """Counts the calls; the first ``num_failures`` fail."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_calls = 0
        self._num_failures = num_failures

    def replace_workers(self) -> None:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise ExecutorFailedError(f"attempt {self.num_calls} failed")


class Clock:
    """Stands still until the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(core: FakeCore) -> tuple[WorkerReplacement, Clock]:
    clock = Clock()
    return WorkerReplacement(cast(EngineCore, core), clock), clock


def test_workers_that_end_again_soon_end_the_core() -> None:
    core = FakeCore()
    replacement, clock = make(core)
    replacement.replace(LOST)
    clock.now = AGAIN_SECONDS
    replacement.replace(LOST)
    assert core.num_calls == 2
    clock.now += AGAIN_SECONDS - 1
    with pytest.raises(WorkerLostError, match="status -9"):
        replacement.replace(LOST)
    assert core.num_calls == 2


def test_a_start_that_fails_is_tried_once_more() -> None:
    core = FakeCore(num_failures=1)
    make(core)[0].replace(LOST)
    assert core.num_calls == 2
    core = FakeCore(num_failures=2)
    with pytest.raises(ExecutorFailedError, match="attempt 2 failed"):
        make(core)[0].replace(LOST)
