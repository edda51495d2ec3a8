"""Recorded steps of models of which some layers keep a state: the trial of a recording advances no state."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.models.transformers.test_states import draw
from tests.parity.engine import Engine
from tests.parity.state_checkpoints import SERVED, write_model
from tokenloom.gpu_worker.call_recording.recorder import UnrecordableError
from tokenloom.gpu_worker.cpu_graphs.recorded_model import RecordedModel

KINDS = ("qwen3_5_text", "granitemoehybrid", "lfm2", "mamba2", "falcon_h1")


def answers(path: Path) -> list[list[list[int]]]:
    engine = Engine(path, num_blocks=64, budget=64, prefix_caching=True)
    prompts = [draw(20 + index, seed=index) for index in range(4)]
    return [engine.generate(prompts[:count], [12] * count) for count in (1, 4, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_give_the_same_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVED, "granitemoehybrid", SERVED["granitemoehybrid"] | {"num_local_experts": 0})
    path, compute, was_recorded = write_model(kind, tmp_path), RecordedModel.compute, list[bool]()

    def watched(self: RecordedModel, *arguments: Any, **options: Any) -> Any:
        found = compute(self, *arguments, **options)
        was_recorded.append(found is not None)
        return found

    monkeypatch.setattr(RecordedModel, "compute", watched)
    recorded = answers(path)
    assert sum(was_recorded) > 20

    def fail(*arguments: Any) -> None:
        raise UnrecordableError("a test")

    was_recorded.clear()
    with monkeypatch.context() as failing:
        failing.setattr(RecordedModel, "_make_step", fail)
        assert answers(path) == recorded
    assert was_recorded
    assert not any(was_recorded)

    monkeypatch.setattr(RecordedModel, "compute", lambda *_, **__: None)
    assert answers(path) == recorded
