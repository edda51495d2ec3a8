"""Workers whose steps are traced say how long the halves of each take; others are as they were made."""

from typing import Any

import msgspec
import pytest

from tokenloom.engine_core.data.config import EngineConfig, ObservabilityConfig, WorkerConfig
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput, WorkerTimes
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.services.engine.core.workers import TracedWorker, make_worker

TRACED = ObservabilityConfig(trace_steps=True)


class Halves:
    """A worker of which one half takes 5 ns and the other 7."""

    name = "halves"

    def __init__(self, *, promises: bool) -> None:
        self.now = 0
        self._promises = promises
        self._output = ModelRunnerOutput(["a"], [[1]])

    def execute_model(self, scheduler_output: object) -> None:
        self.now += 5

    def sample_tokens(self, grammar: object) -> Any:
        self.now += 3
        if self._promises:
            return self
        self.now += 4
        return self._output

    def result(self) -> ModelRunnerOutput:
        self.now += 4
        return self._output


@pytest.mark.parametrize("promises", [False, True])
def test_times_of_the_halves_of_a_step(promises: bool) -> None:
    halves = Halves(promises=promises)
    worker: Any = TracedWorker(halves, lambda: halves.now)  # type: ignore[arg-type]
    worker.execute_model(None)
    output = worker.sample_tokens(None)
    if promises:
        assert output.result() is output.result()
        output = output.result()
    assert output.times == WorkerTimes(5, 7)
    assert output.sampled_token_ids == [[1]]
    assert worker.name == "halves"


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(worker=WorkerConfig(worker="hash"))


def test_only_a_traced_engine_has_one(config: EngineConfig) -> None:
    assert type(make_worker(config)) is HashWorker
    assert type(make_worker(msgspec.structs.replace(config, observability=TRACED))) is TracedWorker
    timed = msgspec.structs.replace(config, worker=WorkerConfig(worker="timed"), observability=TRACED)
    assert type(make_worker(timed)).__name__ == "TimedWorker"
