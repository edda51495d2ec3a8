import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile, record_function

from tests.gpu_worker.conftest import EditConfig, RunModel, SaveCheckpoint
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.layers import weight_memory
from tokenloom.gpu_worker.model_slot import ModelSlot, WeightsLostError
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.models.model import LanguageModel
from tokenloom.process.fall_backs import OF_PROCESS


def make_slot(path: Path, quantization: str | None = None) -> ModelSlot:
    return ModelSlot(path, ModelLoader(quantization=quantization))


@pytest.fixture
def logits(run_model: RunModel):
    def logits(model: LanguageModel) -> torch.Tensor:
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


def test_a_reload_that_fails_halfway_leaves_no_weights_until_another_succeeds(
    save_checkpoint: SaveCheckpoint, logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, other = make_slot(save_checkpoint("llama")), save_checkpoint("llama", initializer_range=0.3)
    take = Checkpoint.take

    def fail_in_a_layer(self: Checkpoint, name: str, *shape: int) -> torch.Tensor:
        tensor = take(self, name, *shape)
        if name.endswith("layers.1.mlp.down_proj.weight") and tensor.device.type == "cpu":
            raise OSError("the disk failed")
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "take", fail_in_a_layer)
        with pytest.raises(WeightsLostError, match="OSError: the disk failed"):
            slot.replace(other)
    assert not slot.is_loaded
    with pytest.raises(ValueError, match="reload_weights"):
        slot.restore()
    slot.replace(other)
    torch.testing.assert_close(logits(slot.model), logits(load_model(other)), rtol=0, atol=0)


def test_a_tensor_that_does_not_fit_is_found_before_any_is_replaced(save_checkpoint: SaveCheckpoint, logits) -> None:
    slot, other = make_slot(save_checkpoint("llama")), save_checkpoint("llama", initializer_range=0.3)
    before = logits(slot.model)
    tensors = load_file(other / "model.safetensors")
    last = tensors.pop("model.norm.weight")
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor model\.norm\.weight"):
        slot.replace(other)
    save_file(tensors | {"model.norm.weight": last[:-1].clone()}, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape"):
        slot.replace(other)
    save_file(tensors | {"model.norm.weight": last, "model.extra": last.clone()}, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"unsupported feature: model\.extra"):
        slot.replace(other)
    torch.testing.assert_close(logits(slot.model), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "quantization"), [("gpt2", None), ("qwen3", None), ("llama", "int8-dynamic"), ("llama", "int4")]
)
def test_every_kind_of_model_takes_new_weights(
    save_checkpoint: SaveCheckpoint, logits, kind: str, quantization: str | None
) -> None:
    slot, other = make_slot(save_checkpoint(kind), quantization), save_checkpoint(kind, initializer_range=0.3)
    before = logits(slot.model)
    slot.replace(other)
    assert OF_PROCESS.own() == [], "the check of the files computes nothing, so it lacks no kernels"
    found = logits(slot.model)
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, logits(make_slot(other, quantization).model), rtol=0, atol=0)


LAYERED = {"num_hidden_layers": 6, "intermediate_size": 192, "num_key_value_heads": 4}
LAYER_BYTES = (4 * 64 * 64 + 3 * 64 * 192) * 4
"""Of a layer's matrices in float32, a sixth of the model."""


def allocated(path: Path, quantization: str | None, other: Path, replace: Callable[[ModelSlot], object]) -> list[int]:
    """Return how many bytes the tensors of a slot take, and by how many more tensors take after each allocation and
    deallocation while ``replace`` gives it the weights of ``other``.

    PyTorch's profiler counts to the byte what this thread allocates, whatever other threads do and earlier tests left.
    The resident memory of a process also holds its heaps and what imports leave, and its peak took a process of its own
    with a model of 136 MiB.
    """
    files = {(each / "model.safetensors").stat().st_size for each in (path, other)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        slot = make_slot(path, quantization)
        with record_function("replace"):
            replace(slot)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == "replace")
    # The profiler counts a file that is mapped as well, whose pages the system drops when it needs them.
    changes = [event for event in events if event.name() == "[memory]" and abs(event.nbytes()) not in files]
    weights = sum(event.nbytes() for event in changes if event.start_ns() < begin)
    return [weights, *accumulate(event.nbytes() for event in changes if event.start_ns() >= begin)]


@pytest.mark.parametrize(("quantization", "most"), [(None, 0.5), ("int8-dynamic", 1.5), ("int4", 0.75)])
def test_replacing_needs_memory_for_one_part_of_the_model(
    save_checkpoint: SaveCheckpoint, monkeypatch: pytest.MonkeyPatch, quantization: str | None, most: float
) -> None:
    """Of few bits the rounding makes several copies of a matrix in float32, but of one matrix at a time."""
    monkeypatch.setattr(
        weight_memory, "_LEAST", 1 << 40
    )  # PyTorch allocates all tensors then, so the profiler counts them
    path, other = save_checkpoint("llama", **LAYERED), save_checkpoint("llama", **LAYERED, initializer_range=0.3)
    weights, *taken = allocated(path, quantization, other, lambda slot: slot.replace(other))
    assert taken[-1] == 0, "the new weights take what the old ones took"
    assert 0 < max(taken) <= most * LAYER_BYTES < weights

    def load_beside(slot: ModelSlot) -> None:
        slot.model = load_model(other, quantization=quantization)

    assert max(allocated(path, quantization, other, load_beside)[1:]) >= weights, "two models are seen"


def test_files_that_changed_after_they_were_checked_are_not_taken(
    save_checkpoint: SaveCheckpoint, logits, tmp_path: Path
) -> None:
    """Another rank may have loaded the files that were checked."""
    slot, other = make_slot(save_checkpoint("llama")), save_checkpoint("llama", initializer_range=0.3)
    slot.check(other)
    third = save_checkpoint("llama", initializer_range=0.6)
    os.replace(third / "model.safetensors", other / "model.safetensors")
    with pytest.raises(WeightsLostError, match="the files changed after they were checked"):
        slot.replace(other)
    assert not slot.is_loaded
    slot.replace(other)
    torch.testing.assert_close(logits(slot.model), logits(load_model(other)), rtol=0, atol=0)


def test_a_file_that_cannot_be_read_is_refused_and_changes_nothing(save_checkpoint: SaveCheckpoint, logits) -> None:
    slot, other = make_slot(save_checkpoint("llama")), save_checkpoint("llama", initializer_range=0.3)
    before = logits(slot.model)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").symlink_to(other / "blob")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        slot.check(other)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").symlink_to(other / "model.safetensors")  # a loop
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        slot.replace(other)
    torch.testing.assert_close(logits(slot.model), before, rtol=0, atol=0)
