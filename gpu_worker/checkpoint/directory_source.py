"""Reads the weights of a checkpoint directory, whichever format its files have."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from .files.packed_weight import PackedWeight
from .files.tensor_files import PytorchFiles, SafetensorsFiles
from .files.weight_files import is_pickled, weight_files
from .quantization.scheme import Found, Scheme, TensorFiles

_FLOATING = ("float32", "bfloat16", "float16", "float64")


class WeightFiles(TensorFiles, Protocol):
    """Holds the open weight files of a checkpoint."""

    @property
    def views(self) -> Sequence[Tensor]:
        """Return a view of each mapped file that was read, until it is closed."""

    def dtype(self, name: str) -> str:
        """Return the name of a tensor's stored dtype: that of PyTorch for the usual floating-point dtypes."""

    def close(self) -> None: ...


class DirectorySource:
    """Fulfils :class:`.weights.WeightSource`; ``scheme`` joins the parts of quantized weights."""

    described_by = "config.json"

    def __init__(self, directory: Path, scheme: Scheme | None) -> None:
        self._files = _open(weight_files(directory))
        self._found: Mapping[str, Found] = scheme.find(self._files) if scheme else {}
        parts = {part for found in self._found.values() for part in found.parts}
        self.names = frozenset(self._files.names).difference(parts) | self._found.keys()

    @property
    def views(self) -> Sequence[Tensor]:
        return self._files.views

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        return self._found[name].weight if name in self._found else self._files.read(name)

    def close(self) -> None:
        self._files.close()


def stored_dtype(directory: Path) -> str:
    """Return the name of the first floating-point tensor's dtype, for a configuration that declares none."""
    files = _open(weight_files(directory)[:1])
    try:
        stored = [files.dtype(name) for name in sorted(files.names)]
    finally:
        files.close()
    return next((dtype for dtype in stored if dtype in _FLOATING), stored[0])


def _open(paths: Collection[Path]) -> WeightFiles:
    paths = list(paths)
    return PytorchFiles(paths) if is_pickled(paths[0]) else SafetensorsFiles(paths)
