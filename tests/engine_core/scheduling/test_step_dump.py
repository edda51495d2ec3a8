import json
from pathlib import Path

import msgspec
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request
from tokenloom.engine_core.config import ObservabilityConfig
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.wire.scheduler_output import SchedulerOutput


class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        raise RuntimeError("cannot compute 4242")


def fail_a_step(observability: ObservabilityConfig) -> None:
    config = msgspec.structs.replace(make_config(), observability=observability)
    core = EngineCore(config, UniProcExecutor(FailingWorker(config, vocab_size=VOCAB_SIZE)))
    core.add_request(make_request("a", [61, 62, 63, 64, 65], 7))
    with pytest.raises(RuntimeError):
        core.step()


def test_a_failed_step_leaves_what_was_asked_and_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_tokens_are_named_only_when_asked_for(tmp_path: Path) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path), dump_tokens=True))
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["requests"]["a"]["token_ids"] == [61, 62, 63, 64, 65]
    assert dump["error"] == "RuntimeError: cannot compute 4242"


def test_a_dump_that_cannot_be_written_hides_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path / "absent")))
    assert "the dump of a failed step cannot be written" in caplog.text
