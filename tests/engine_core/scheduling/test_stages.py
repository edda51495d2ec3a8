"""Tests steps of a model in stages: what overlaps holds different requests, and nothing else changes."""

import itertools

from msgspec.structs import replace

from tests.engine_core.executor.late import LateExecutor
from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, make_worker, tokens_of
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens


class Recording(LateExecutor):
    """Two steps in flight; keeps which requests each step computed."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.steps: list[set[str]] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.steps.append(set(scheduler_output.num_scheduled_tokens))
        super().execute_model(scheduler_output)


def test_steps_in_flight_hold_different_requests() -> None:
    config = replace(make_config(budget=16), parallel=ParallelConfig(pipeline_parallel_size=2))
    executor = Recording(make_worker(config))
    core = EngineCore(config, executor)
    for n in range(5):
        core.add_request(make_request(f"r{n}", [n] * (4 * n + 1), 10))
    outputs = finish(core, 1000)
    for n in range(5):
        assert tokens_of(outputs[f"r{n}"]) == expected_tokens([n] * (4 * n + 1), 10, vocab_size=VOCAB_SIZE)
    decoding = executor.steps[8:-8]
    assert len(decoding) > 4
    assert all(not step & following for step, following in itertools.pairwise(decoding))
    assert max(map(len, decoding)) <= 3, "a step has one stage's share of five requests"
    check_idle(core.scheduler)


def test_a_single_request_waits_for_its_own_token() -> None:
    config = replace(make_config(), parallel=ParallelConfig(pipeline_parallel_size=2))
    core = EngineCore(config, LateExecutor(make_worker(config)))
    core.add_request(make_request("a", [1, 2, 3], 6))
    assert tokens_of(finish(core, 100)["a"]) == expected_tokens([1, 2, 3], 6, vocab_size=VOCAB_SIZE)
