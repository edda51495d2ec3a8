"""Defines what a quantization method needs of a checkpoint's files and what it finds there, and holds weights whose
numbers are stored as unsigned integers with scales and zero points (GPTQ, AWQ, W4A16)."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..files.quantized_weight import PackedWeight, QuantizedWeight, from_codes


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


def find_layers(files: TensorFiles, suffix: str, find: Callable[[TensorFiles, str], Found]) -> Mapping[str, Found]:
    """Return what ``find`` makes of each layer that has a tensor with this suffix, by the name that models use, such
    as ``model.layers.0.mlp.up_proj.weight``.

    ``find`` raises ``ValueError`` naming a tensor that is missing or has a wrong shape.
    """
    layers = [name.removesuffix(suffix) for name in files.names if name.endswith(suffix)]
    return {f"{layer}.weight": find(files, layer) for layer in layers}


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


def read_order(files: TensorFiles, name: str, inputs: int, num_groups: int) -> Tensor | None:
    """Return the tensor ``name`` [inputs], the group of each input; None: inputs that follow each other share a group.

    Raises ``ValueError`` if it has another shape, or names a group that has no scale.
    """
    if name not in files.names:
        return None
    check_part(files, name, inputs)
    order = files.read(name)
    if not order.numel() or bool((order == -1).all()):  # as compressed-tensors writes layers without such an order
        return None
    if order.is_floating_point() or int(order.min()) < 0 or int(order.max()) >= num_groups:
        raise ValueError(f"{name} names a group that has no scale: each must be an integer from 0 to {num_groups - 1}")
    return order


_KV_SCALE = re.compile(r".+\.([qkv]_scale|kv_scale|[kv]_zero_point|[kv]_proj\.output_(scale|zero_point))")


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor is a scale of a quantized KV cache, which vLLM loads under these names."""
    return _KV_SCALE.fullmatch(name) is not None


class Codes(NamedTuple):
    """Holds some rows of a weight: (codes - zeros) * scales, with one zero point and scale for each group."""

    codes: Tensor
    """[rows, in] uint8."""
    zeros: Tensor | None
    """[rows, groups] uint8; None: the middle of the codes' range."""
    scales: Tensor
    """[rows, groups], floating."""


@dataclass(frozen=True)
class PackedCodes:
    """Fulfils :class:`~..files.quantized_weight.PackedWeight`."""

    shape: tuple[int, int]
    bits: int
    group: int | None
    has_offsets: bool
    read: Callable[[int, int], Codes]
    """Return the rows from the first to before the second argument."""
    group_of_input: Tensor | None = None
    """[in] integers: the group of each input, if inputs of a group are not neighbours."""
    rounds_inputs: bool = False

    def rows(self, first: int, last: int) -> Tensor:
        part = self.read(first, last)
        if self.group is not None:
            return from_codes(*part, self.bits, self.group).dequantize()
        assert self.group_of_input is not None
        index = self.group_of_input.long()
        zeros = 1 << (self.bits - 1) if part.zeros is None else part.zeros.float()[:, index]
        return (part.codes.float() - zeros) * part.scales.float()[:, index]

    def quantized(self) -> QuantizedWeight:
        assert self.group is not None
        return from_codes(*self.read(0, self.shape[0]), self.bits, self.group)


def groups_of(inputs: int, group_size: int) -> tuple[int, int]:
    """Return (inputs that share a scale, number of groups); a group size of -1 means that all inputs share one."""
    group = inputs if group_size == -1 else group_size
    return group, -(-inputs // group)


def differs(order: Tensor, group: int) -> bool:
    """Return whether the inputs of a group, which ``order`` names for each, are not runs of ``group`` neighbours."""
    return not torch.equal(order.int(), torch.arange(len(order), dtype=torch.int32) // group)


def packed_codes(
    shape: tuple[int, int],
    bits: int,
    group: int,
    has_offsets: bool,
    read: Callable[[int, int], Codes],
    stored: Tensor | None = None,
) -> PackedCodes:
    """Return the weight that ``read`` gives rows of, whose groups are runs of ``group`` neighbours unless that leaves a
    rest, or ``stored`` [in] integers, the group of each input in the checkpoint, say otherwise."""
    in_order = torch.arange(shape[1], dtype=torch.int32) // group
    if stored is not None and differs(stored, group):
        return PackedCodes(shape, bits, None, has_offsets, read, stored)
    whole = shape[1] % group == 0
    return PackedCodes(shape, bits, group if whole else None, has_offsets, read, None if whole else in_order)
