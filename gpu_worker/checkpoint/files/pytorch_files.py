"""Reads the tensors of files that ``torch.save`` wrote (``pytorch_model.bin``), which run no code of theirs."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class PytorchFiles:
    """Fulfils :class:`.quantization.scheme.TensorFiles` for the files of a checkpoint, which stay mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read where the tensors are. Raises ``ValueError`` for a file that holds other objects than tensors."""
        self._tensors: dict[str, Tensor] = {}
        self.views: list[Tensor] = []
        for path in paths:
            tensors = _read_tensors(path)
            self._tensors.update(tensors)
            self.views += list(tensors.values())[:1]

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def close(self) -> None:
        self._tensors = {}
        self.views = []


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Map the file. Only tensors and plain values pass ``weights_only``, so that no code of the file runs."""
    try:
        # facebook/opt-125m and other early models have no other file on the hub. mmap needs the format of PyTorch 1.6
        # and later; older files cannot be mapped and are refused.
        values: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken file raises errors of many kinds
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as tensors alone ({reason}): convert it to safetensors with save_pretrained of "
            "transformers"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(tensor, Tensor) for tensor in values.values()):
        raise ValueError(f"{path} must hold a dictionary of tensors: convert the checkpoint to safetensors")
    return values
