"""Defines what a quantization method needs of a checkpoint's files, and what it finds there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..files.packed_weight import PackedWeight


class TensorFiles(Protocol):
    """Holds the tensors of a checkpoint's files under their stored names."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""

    def read(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype, as a view of the mapped file where that is possible."""


@dataclass(frozen=True)
class Found:
    """Holds a quantized weight and the stored tensors that it is made of."""

    weight: PackedWeight
    parts: tuple[str, ...]
    """Names of tensors that belong to the weight, whether they are present or not."""


class Scheme(Protocol):
    """Holds the entries of a ``quantization_config``. Equal schemes read the same tensors in the same way."""

    @property
    def name(self) -> str:
        """Return the method's name, such as ``gptq-int4``; part of the engine's numerics."""

    def find(self, files: TensorFiles) -> Mapping[str, Found]:
        """Return the quantized weights by the names that models ask for, such as ``model.layers.0.mlp.up_proj.weight``.

        Raises ``ValueError`` naming a tensor that is missing or has a wrong shape.
        """


def part_shape(files: TensorFiles, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor that a quantized weight needs. Raises ``ValueError`` if it is missing."""
    if name not in files.names:
        raise ValueError(f"the checkpoint has no tensor {name}, which its quantization_config asks for")
    return files.shape(name)


def check_part(files: TensorFiles, name: str, *shape: int) -> None:
    """Raise ``ValueError`` unless the tensor ``name`` is present and has this shape."""
    found = part_shape(files, name)
    if found != shape:
        raise ValueError(f"{name} has shape {list(found)}, its quantization_config asks for {list(shape)}")
