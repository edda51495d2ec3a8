import json
import logging
from pathlib import Path

import msgspec
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, make_worker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import ObservabilityConfig
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.scheduling.step_reports import IterationLog


class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        raise RuntimeError("cannot compute 4242")


def fail_a_step(observability: ObservabilityConfig) -> None:
    config = msgspec.structs.replace(make_config(), observability=observability)
    core = EngineCore(config, UniProcExecutor(FailingWorker(config, vocab_size=VOCAB_SIZE)))
    core.add_request(make_request("a", [61, 62, 63, 64, 65], 7))
    with pytest.raises(RuntimeError):
        core.step()


def test_a_dump_describes_the_failed_step_without_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path)))
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["error"] == "RuntimeError"
    assert dump["num_scheduled_tokens"] == {"a": 5}
    assert dump["requests"]["a"]["num_prompt_tokens"] == 5
    assert len(dump["requests"]["a"]["block_ids"]) == 2
    assert dump["stats"]["num_running"] == 1
    assert "token_ids" not in dump["requests"]["a"]
    assert path.read_text() in caplog.text


def test_a_dump_has_tokens_only_if_configured(tmp_path: Path) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path), dump_tokens=True))
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["requests"]["a"]["token_ids"] == [61, 62, 63, 64, 65]
    assert dump["error"] == "RuntimeError: cannot compute 4242"


def test_a_dump_that_cannot_be_written_hides_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path / "absent")))
    assert "the dump of a failed step cannot be written" in caplog.text


def test_a_line_reports_the_work_and_duration_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_request_that_verifies_drafts_decodes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    iterations = IterationLog(iter([1.0, 2.0]).__next__)
    iterations.begin()
    cached = CachedRequestData(["a", "b"], [[], []], [9, 9], {})
    step = SchedulerOutput([], cached, {"a": 4, "b": 7}, 11, [], [], {"a": [1, 2, 3]})
    iterations.end(1, step)
    (record,) = caplog.records
    assert "1 context requests, 7 context tokens, 1 generation requests, 4 generation tokens" in record.getMessage()


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_step_of_a_core_is_a_line(overlaps: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenloom.engine_core.scheduling.step_reports")
    config = make_config(async_scheduling=overlaps)
    config = msgspec.structs.replace(config, observability=ObservabilityConfig(log_iterations=True))
    core = EngineCore(config, make_executor(config, make_worker))
    core.add_request(make_request("a", [1, 2, 3], 4))
    finish(core)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [f"Iteration({n})" for n in range(1, 5)]
    assert "1 context requests, 3 context tokens" in lines[0]
    core.shutdown()
