"""Checkpoints on disk: what is read, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenloom.gpu_worker.checkpoint.files.config_reader import stored_dtype, weight_files
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.models.load_model import load_model

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    return tmp_path


def test_take_checks_and_casts(directory: Path) -> None:
    with Checkpoint(directory, torch.bfloat16, CPU) as checkpoint:
        taken = checkpoint.take("a", 2, 3)
        assert taken.dtype == torch.bfloat16
        assert taken.tolist() == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(ValueError, match=r"a has shape \[2, 3\], config.json asks for \[3, 2\]"):
            checkpoint.take("a", 3, 2)
        with pytest.raises(ValueError, match="no tensor c"):
            checkpoint.take("c", 1)


def test_tensors_outlive_the_checkpoint(directory: Path) -> None:
    with Checkpoint(directory, torch.float32, CPU) as checkpoint:
        taken = checkpoint.take("a", 2, 3)
    assert taken.sum() == 15


def test_what_nobody_takes_is_named(directory: Path) -> None:
    with Checkpoint(directory, torch.float32, CPU) as checkpoint:
        checkpoint.take("a", 2, 3)
        with pytest.raises(ValueError, match=r"unsupported feature: b$"):
            checkpoint.refuse_rest()
        checkpoint.skip(["b", "never there"])
        checkpoint.refuse_rest()


def test_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    """A private copy would lie outside of the file's mapping."""
    save_file({"big": torch.ones(1 << 20)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        big = checkpoint.take("big", 1 << 20)
    assert _mapped_file(big.data_ptr()) == str(tmp_path / "model.safetensors")


def _mapped_file(address: int) -> str:
    """The file that this process has mapped at an address; empty for anonymous memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return path[0] if path else ""
    raise ValueError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_stored_dtype(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    save_file({"a": torch.ones(2, dtype=dtype)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == name


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").touch()
    with pytest.raises(ValueError, match=r"neither model\.safetensors\S* nor pytorch_model\.bin"):
        weight_files(tmp_path)


def test_safetensors_win(directory: Path) -> None:
    (directory / "pytorch_model.bin").touch()
    assert weight_files(directory) == [directory / "model.safetensors"]


def test_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        Checkpoint(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "missing.safetensors"])
def test_an_index_that_names_what_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="not in the directory"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="weight_map"):
        weight_files(tmp_path)


def test_a_model_with_a_tensor_too_many_is_refused(
    save_checkpoint: Callable[..., Path], edit_config: Callable[..., None]
) -> None:
    """Biases that the configuration does not mention would otherwise be left out in silence."""
    path = save_checkpoint("llama", attention_bias=True)
    edit_config(path, attention_bias=False)
    with pytest.raises(ValueError, match=r"unsupported feature: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_model(path)
