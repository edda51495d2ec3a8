import logging

import msgspec
import pytest

from tests.engine_core.helpers import finish, make_config, make_request, make_worker
from tokenloom.engine_core.config import ObservabilityConfig
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.executor.executor_choice import make_executor
from tokenloom.engine_core.scheduling.iteration_log import IterationLog
from tokenloom.engine_core.wire.scheduler_output import CachedRequestData, SchedulerOutput


def test_a_line_says_what_a_step_computed_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    iterations = IterationLog(iter([1.0, 2.0, 2.5, 4.0]).__next__)
    iterations.begin()
    iterations.begin()
    # a and b decode, c goes on with its prompt, d is back with one token to compute.
    cached = CachedRequestData(["a", "b", "c", "d"], [[], [], [], [3]], [9, 9, 9, 0], {"d": [5]})
    iterations.end(1, SchedulerOutput([], cached, {"a": 1, "b": 1, "c": 7, "d": 1}, 10, [], []))
    iterations.end(2, SchedulerOutput([], CachedRequestData(["a"], [[]], [10], {}), {"a": 1}, 1, [], []))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "Iteration(1): 2 context requests, 8 context tokens, 2 generation requests, 2 generation tokens, "
        "iteration elapsed time: 1500.00 ms"
    )
    assert "1 generation requests" in second
    assert "2000.00 ms" in second


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_step_of_a_core_is_a_line(overlaps: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenloom.engine_core.scheduling.iteration_log")
    config = make_config(async_scheduling=overlaps)
    config = msgspec.structs.replace(config, observability=ObservabilityConfig(log_iterations=True))
    core = EngineCore(config, make_executor(config, make_worker))
    core.add_request(make_request("a", [1, 2, 3], 4))
    finish(core)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [f"Iteration({n})" for n in range(1, 5)]
    assert "1 context requests, 3 context tokens" in lines[0]
    core.shutdown()
