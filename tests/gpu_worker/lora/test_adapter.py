"""What is read of a peft directory, and what is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.lora.random_adapter import save_adapter
from tokenloom.gpu_worker.lora.adapter import Adapter, Layout, read_adapter

SHAPES = {"model.layers.0.mlp.up_proj": (6, 4), "model.layers.0.mlp.down_proj": (4, 6)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in SHAPES.items()}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def read(path: Path, max_rank: int = 8) -> Adapter:
    return read_adapter(path, SHAPES, max_rank, torch.float32, Layout(8))


@pytest.mark.parametrize(("entries", "scaling"), [({}, 2.0), ({"use_rslora": True, "lora_alpha": 3}, 1.5)])
def test_matrices_are_arranged_and_scaled(
    checkpoint: Path, tmp_path: Path, entries: dict[str, object], scaling: float
) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint, rank=4, **entries)
    adapter = read(path)
    stored = load_file(path / "adapter_model.safetensors")
    assert adapter.rank == 4
    assert set(adapter.layers) == set(SHAPES)
    for name, matrices in adapter.layers.items():
        a, b = (stored[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
        assert torch.equal(matrices.down[:, :4], a.t())
        assert matrices.down.shape[1] == 8
        assert not matrices.down[:, 4:].any()
        torch.testing.assert_close(matrices.up, b.t() * scaling)


def test_the_digest_is_that_of_both_files(checkpoint: Path, tmp_path: Path) -> None:
    one, same, other = (
        save_adapter(tmp_path / name, checkpoint, seed=seed) for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert read(one).digest == read(same).digest != read(other).digest
    config = same / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    assert read(one).digest != read(same).digest


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 9}, "ranks from 1 to 8"),
        ({"r": "4"}, "ranks from 1 to 8"),
        ({"r": 2}, "has shape"),
        ({"lora_alpha": "8"}, "lora_alpha"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(
    checkpoint: Path, tmp_path: Path, entries: dict[str, object], wanted: str
) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint, **entries)
    with pytest.raises(ValueError, match=wanted):
        read(path)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "tensor .*embed_tokens.lora_embedding_A"),
        ("base_model.model.lm_head.weight", "tensor .*lm_head.weight"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", "lora_magnitude_vector"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", "only one of its two"),
    ],
)
def test_a_tensor_that_is_not_supported_is_named(checkpoint: Path, tmp_path: Path, key: str, wanted: str) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    save_file(load_file(file) | {key: torch.ones(4, 4)}, file)
    with pytest.raises(ValueError, match=wanted):
        read(file.parent)


def test_a_layer_that_the_model_lacks_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint)
    with pytest.raises(ValueError, match=r"up_proj cannot have an adapter; those of this model are down_proj"):
        read_adapter(path, {"model.layers.0.mlp.down_proj": (4, 6)}, 8, torch.float32, Layout(8))


def test_numbers_must_be_finite(checkpoint: Path, tmp_path: Path) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    save_file({key: tensor * float("inf") for key, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="finite"):
        read(file.parent)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: No such file"):
        read(tmp_path / "absent")
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"adapter_config\.json: not JSON"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        read(tmp_path)
