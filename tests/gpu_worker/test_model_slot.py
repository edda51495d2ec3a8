import json
import os
from pathlib import Path

import pytest
import torch

from tests.gpu_worker.conftest import EditConfig, RunModel, SaveCheckpoint
from tokenloom.gpu_worker.model_slot import ModelSlot
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.models.model import Model


def make_slot(path: Path) -> ModelSlot:
    return ModelSlot(path, "auto", load_model)


@pytest.fixture
def logits(run_model: RunModel):
    def logits(model: Model) -> torch.Tensor:
        return run_model(model, [torch.arange(9)], [[9]])[0]

    return logits


def test_dropped_weights_come_back_the_same(save_checkpoint: SaveCheckpoint, logits) -> None:
    slot = make_slot(save_checkpoint("llama"))
    before = logits(slot.model)
    slot.drop(restorable=True)
    assert not slot.is_loaded
    with pytest.raises(AssertionError, match="asleep"):
        logits(slot.model)
    slot.restore()
    slot.restore()
    torch.testing.assert_close(logits(slot.model), before, rtol=0, atol=0)


def test_files_that_changed_are_not_taken_for_the_same(save_checkpoint: SaveCheckpoint) -> None:
    path = save_checkpoint("llama")
    slot = make_slot(path)
    slot.drop(restorable=True)
    weights = path / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    with pytest.raises(ValueError, match="changed after they were loaded"):
        slot.restore()
    assert not slot.is_loaded
    slot.replace(path)
    assert slot.is_loaded


def test_weights_dropped_for_good_come_only_by_replacing(save_checkpoint: SaveCheckpoint) -> None:
    path = save_checkpoint("llama")
    slot = make_slot(path)
    slot.drop(restorable=False)
    with pytest.raises(ValueError, match="reload_weights"):
        slot.restore()
    slot.replace(path)
    slot.drop(restorable=True)
    slot.restore()
    assert slot.is_loaded


def test_other_weights_of_the_same_shapes_are_taken(save_checkpoint: SaveCheckpoint, logits) -> None:
    slot, other = make_slot(save_checkpoint("llama")), save_checkpoint("llama", initializer_range=0.3)
    slot.replace(other)
    torch.testing.assert_close(logits(slot.model), logits(load_model(other)), rtol=0, atol=0)
    slot.drop(restorable=True)
    slot.restore()
    torch.testing.assert_close(logits(slot.model), logits(load_model(other)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"vocab_size": 100}, "vocab_size is 100 in the new checkpoint and 199 in"),
        ({"rms_norm_eps": 0.5}, "norm_eps is 0.5 in the new"),
    ],
)
def test_another_architecture_is_refused_and_changes_nothing(
    save_checkpoint: SaveCheckpoint, logits, entries: dict[str, float], error: str
) -> None:
    slot, other = make_slot(save_checkpoint("llama")), save_checkpoint("llama", **entries)
    before = logits(slot.model)
    with pytest.raises(ValueError, match=error):
        slot.replace(other)
    torch.testing.assert_close(logits(slot.model), before, rtol=0, atol=0)


def test_a_broken_checkpoint_is_refused_and_changes_nothing(
    save_checkpoint: SaveCheckpoint, edit_config: EditConfig, logits
) -> None:
    path = save_checkpoint("llama")
    slot = make_slot(path)
    before = logits(slot.model)
    other = save_checkpoint("llama")
    (other / "model.safetensors").write_bytes(json.dumps({}).encode())
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        slot.replace(other)
    with pytest.raises(ValueError, match=r"config\.json"):
        slot.replace(path.parent / "nowhere")
    torch.testing.assert_close(logits(slot.model), before, rtol=0, atol=0)
