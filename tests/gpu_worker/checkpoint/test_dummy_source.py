"""Random weights in the place of a checkpoint's."""

import pytest
import torch

from tests.gpu_worker.models.test_models import MODELS
from tokenloom.gpu_worker.checkpoint.directory_source import DummySource
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.model_slot import ModelSlot
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.models.self_check import CheckedModel
from tokenloom.gpu_worker.parallel.sharding import Shard
from tokenloom.model_files.checkpoint import dummy_fingerprint

CPU = torch.device("cpu")
META = torch.device("meta")


def without_weights(path):
    for file in path.glob("*.safetensors*"):
        file.unlink()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_every_family_loads_without_files(name, save_checkpoint):
    model_type, entries = MODELS[name]
    path = without_weights(save_checkpoint(model_type, **entries))
    model = load_model(path, "bfloat16", META, load_format="dummy")
    assert not isinstance(model, CheckedModel)
    assert model.config.dtype == torch.bfloat16


@torch.inference_mode()
def test_engines_have_the_same_weights(save_checkpoint, run_model):
    path = without_weights(save_checkpoint("qwen3"))
    prompt = [torch.arange(20)]
    found = [run_model(load_model(path, load_format="dummy"), prompt, [[20]])[0] for _ in range(2)]
    assert torch.equal(*found)
    assert found[0].std() > 0
    assert found[0].isfinite().all()


def test_values_follow_from_names_and_shapes():
    source = DummySource(torch.float32, CPU)
    weight = source.read("a.weight", (64, 32))
    assert torch.equal(weight, source.read("a.weight", (64, 32)))
    assert not torch.equal(weight, source.read("b.weight", (64, 32)))
    assert 0.018 < weight.std() < 0.022
    assert (source.read("norm.weight", (8,)) == 1).all()
    assert (source.read("q_proj.bias", (8,)) == 0).all()
    assert source.read("a.weight", (3, 2)).dtype == torch.float32


def test_what_it_cannot_make_is_refused(save_checkpoint):
    path = without_weights(save_checkpoint("llama"))
    with pytest.raises(ValueError, match="load_format dummy makes weights for the built-in architectures"):
        load_model(path, model_impl="transformers", load_format="dummy")
    slot = ModelSlot(path, ModelLoader("float32", CPU, load_format="dummy"))
    with pytest.raises(ValueError, match="no files replace them"):
        slot.replace(path)


def test_they_come_back_after_sleep(save_checkpoint):
    path = without_weights(save_checkpoint("llama"))
    slot = ModelSlot(path, ModelLoader("float32", CPU, load_format="dummy"))
    slot.drop(restorable=True)
    slot.restore()
    assert slot.is_loaded


def test_their_fingerprint_is_of_the_configuration(save_checkpoint):
    path = without_weights(save_checkpoint("llama"))
    before = dummy_fingerprint(path)
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    assert dummy_fingerprint(path) != before


def test_a_part_keeps_nothing_of_the_whole(tmp_path):
    whole = Checkpoint(tmp_path, torch.float32, CPU, source=DummySource(torch.float32, CPU)).take("a.weight", 9, 4)
    with Checkpoint(tmp_path, torch.float32, CPU, source=DummySource(torch.float32, CPU)) as checkpoint:
        part = checkpoint.take("a.weight", Shard(1, 2).vocabulary(9), 4)
    assert torch.equal(part, whole[4:])
    assert part.untyped_storage().nbytes() == part.nbytes
