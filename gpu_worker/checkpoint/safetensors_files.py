"""Reads the tensors of a safetensors checkpoint from one file or several."""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .packed_weight import PackedWeight
from .quantization.scheme import Found, Scheme

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class SafetensorsFiles:
    """Fulfils :class:`.quantization.scheme.TensorFiles` for the files of a checkpoint directory, which stay mapped."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.paths = weight_files(directory)
        for path in self.paths:
            file = self._stack.enter_context(_open(path))
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._stack.close()


class SafetensorsSource:
    """Fulfils :class:`.weights.WeightSource`; ``scheme`` joins the parts of quantized weights."""

    described_by = "config.json"

    def __init__(self, directory: Path, scheme: Scheme | None) -> None:
        self._files = SafetensorsFiles(directory)
        self.paths = self._files.paths
        self._found: Mapping[str, Found] = scheme.find(self._files) if scheme else {}
        parts = {part for found in self._found.values() for part in found.parts}
        self.names = frozenset(self._files.names).difference(parts) | self._found.keys()

    def read(self, name: str) -> Tensor | PackedWeight:
        return self._found[name].weight if name in self._found else self._files.read(name)

    def close(self) -> None:
        self._files.close()


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises ``ValueError`` if there are none or one is missing."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise ValueError(f"{directory} has neither {_SINGLE} nor {_INDEX}: only safetensors weights are supported")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{index} must be a JSON object with a weight_map") from None
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(f"{index} names the file {name!r}, which is not in the directory")
    return [directory / name for name in names]


def stored_dtype(directory: Path) -> str:
    """Return the name of the first floating tensor's dtype, for a configuration that declares none."""
    with _open(weight_files(directory)[0]) as file:
        stored = [str(file.get_slice(name).get_dtype()) for name in sorted(file.keys())]
    return next((_STORED_DTYPES[dtype] for dtype in stored if dtype in _STORED_DTYPES), stored[0])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
