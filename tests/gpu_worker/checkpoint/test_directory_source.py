"""Files that ``torch.save`` wrote are read as tensors alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tokenloom.gpu_worker.checkpoint.files.config_reader import stored_dtype
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint, file_stamps
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.model import LanguageModel

CPU = torch.device("cpu")
PROMPT = torch.arange(7)


def pickled(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Replace a checkpoint's safetensors file by two files of ``torch.save`` with their index."""
    file = path / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    file.unlink()
    names = sorted(tensors)
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for part, members in parts.items():
        torch.save({name: tensors[name] for name in members}, path / part)
    index = {"metadata": {}, "weight_map": {name: part for part, members in parts.items() for name in members}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("name", ["opt", "granite"])
def test_the_model_is_that_of_the_safetensors(
    name: str, save_checkpoint: Callable[..., Path], run_model: Callable[..., list[torch.Tensor]]
) -> None:
    def logits(model: LanguageModel) -> torch.Tensor:
        (result,) = run_model(model, [PROMPT], [[7]])
        return result

    path = save_checkpoint(name)
    expected = logits(load_model(path))
    assert torch.equal(logits(load_model(pickled(path))), expected)


def test_dtype_and_stamps(save_checkpoint: Callable[..., Path]) -> None:
    path = pickled(save_checkpoint("opt"), torch.float16)
    assert stored_dtype(path) == "float16"
    assert [stamp[0] for stamp in file_stamps(path)] == ["config.json", "pytorch_model-1.bin", "pytorch_model-2.bin"]


def test_weights_stay_in_the_mapped_file(tmp_path: Path) -> None:
    torch.save({"big": torch.ones(1 << 20)}, tmp_path / "pytorch_model.bin")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        big = checkpoint.take("big", 1 << 20)
    assert big.sum() == 1 << 20
    maps = Path("/proc/self/maps").read_text().splitlines()
    (mapped,) = [line.split()[0] for line in maps if line.endswith(str(tmp_path / "pytorch_model.bin"))]
    begin, end = (int(address, 16) for address in mapped.split("-"))
    assert begin <= big.data_ptr() < end


class Payload:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_code_in_a_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "b": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read as tensors alone .*safetensors"):
        Checkpoint(tmp_path, torch.float32, CPU)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [{"a": 3}, [torch.ones(2)]])
def test_other_content_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold a dictionary of tensors"):
        Checkpoint(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("data", [b"", b"\x00" * 64])
def test_a_broken_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        Checkpoint(tmp_path, torch.float32, CPU)


def test_a_file_before_pytorch_1_6(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="convert it to safetensors"):
        Checkpoint(tmp_path, torch.float32, CPU)
