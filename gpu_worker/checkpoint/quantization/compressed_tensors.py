"""Reads checkpoints of compressed-tensors: W4A16 and W8A16 packed into words, W8A8 as int8, and FP8.

Layers keep what the method calls activations in the model's dtype, unless they are computed in int8 anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..files.quantized_weight import QuantizedWeight, unpack_words
from .entries import CompressedTensors
from .scheme import (
    Codes,
    Found,
    PackedCodes,
    TensorFiles,
    check_part,
    differs,
    find_layers,
    groups_of,
    packed_codes,
    part_shape,
    read_order,
)
from .small_floats import find_floats


def find_compressed(entries: CompressedTensors, files: TensorFiles) -> Mapping[str, Found]:
    """Return the quantized weights, as :mod:`.scheme` says."""
    return find_layers(files, ".weight_scale", partial(_find, entries))


def _find(entries: CompressedTensors, files: TensorFiles, layer: str) -> Found:
    kinds = "weight_scale weight_packed weight_shape weight_zero_point weight_g_idx input_scale input_zero_point"
    parts = {kind: f"{layer}.{kind}" for kind in kinds.split()}
    weight: Any
    if entries.format == "pack-quantized":
        weight = _packed(entries, files, parts)
    else:
        parts["weight"] = f"{layer}.weight"
        if entries.format == "float-quantized":
            names = parts["weight"], parts["weight_scale"]
            weight = find_floats(files, *names, entries.block, entries.rounds_inputs)
            # Scales are by tensor, output or block: inputs in groups of their own would be swallowed.
            read_order(files, parts["weight_g_idx"], weight.shape[1], 1)
        else:
            weight = _integers(entries, files, parts)
    return Found(weight, tuple(parts.values()))


def _packed(entries: CompressedTensors, files: TensorFiles, parts: Mapping[str, str]) -> PackedCodes:
    check_part(files, parts["weight_shape"], 2)
    outputs, inputs = (int(size) for size in files.read(parts["weight_shape"]).tolist())
    per_word = 32 // entries.bits
    check_part(files, parts["weight_packed"], outputs, -(-inputs // per_word))
    group, num_groups = groups_of(inputs, entries.group_size)
    check_part(files, parts["weight_scale"], outputs, num_groups)
    if not entries.symmetric:
        check_part(files, parts["weight_zero_point"], -(-outputs // per_word), num_groups)
    order = read_order(files, parts["weight_g_idx"], inputs, num_groups)

    def read(first: int, last: int) -> Codes:
        # The last word of a row is filled up when the inputs do not divide evenly.
        codes = unpack_words(files.read(parts["weight_packed"])[first:last], entries.bits)[:, :inputs]
        scales = files.read(parts["weight_scale"])[first:last]
        if entries.symmetric:
            return Codes(codes, None, scales)
        # The zero points are packed along the outputs.
        zeros = unpack_words(files.read(parts["weight_zero_point"]).t(), entries.bits).t()
        return Codes(codes, zeros[first:last], scales)

    return packed_codes((outputs, inputs), entries.bits, group, not entries.symmetric, read, order)


def _integers(entries: CompressedTensors, files: TensorFiles, parts: Mapping[str, str]) -> "PackedIntegers":
    outputs, inputs = shape = part_shape(files, parts["weight"])
    group, num_groups = groups_of(inputs, entries.group_size)
    scale = part_shape(files, parts["weight_scale"])
    if scale not in ((1,), (), (outputs,), (outputs, num_groups)):
        raise ValueError(
            f"{parts['weight_scale']} has shape {list(scale)}, the weight {list(shape)} asks for one scale or "
            f"{[outputs, num_groups]}"
        )
    zeros = None if entries.symmetric else parts["weight_zero_point"]
    if zeros is not None and part_shape(files, zeros) != scale:
        raise ValueError(f"{zeros} has shape {list(files.shape(zeros))}, its scale has {list(scale)}")
    order = read_order(files, parts["weight_g_idx"], inputs, num_groups)
    if scale != (outputs, num_groups):  # one for each output, or for the tensor
        group, order = inputs, None
    elif inputs % group:
        order = torch.arange(inputs) // group if order is None else order
    elif order is not None and not differs(order, group):
        order = None
    names = parts["weight"], parts["weight_scale"], zeros
    return PackedIntegers(
        files, *names, (outputs, inputs), group if order is None else None, order, entries.rounds_inputs
    )


@dataclass(frozen=True)
class PackedIntegers:
    """Fulfils :class:`~..files.quantized_weight.PackedWeight` with a weight that is stored as int8."""

    files: TensorFiles
    weight_name: str
    scale_name: str
    zeros_name: str | None
    shape: tuple[int, int]
    group: int | None
    group_of_input: Tensor | None
    """[in] integers: the group of each input, if ``group`` is None."""
    rounds_inputs: bool
    bits: int = 8

    @property
    def has_offsets(self) -> bool:
        return self.zeros_name is not None

    def rows(self, first: int, last: int) -> Tensor:
        if self.group_of_input is None:
            return self._some(first, last).dequantize()
        values, scales, zeros = self._parts(first, last)
        index = self.group_of_input.long()
        centred = values.float() if zeros is None else values.float() - zeros[:, index]
        return centred * scales[:, index]

    def quantized(self) -> QuantizedWeight:
        return self._some(0, self.shape[0])

    def _some(self, first: int, last: int) -> QuantizedWeight:
        assert self.group is not None
        values, scales, zeros = self._parts(first, last)
        groups = self.shape[1] // self.group
        scales = scales.expand(last - first, groups).contiguous()
        return QuantizedWeight(values, scales, None if zeros is None else -zeros * scales, self.group)

    def _parts(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the integers of some rows, their scales and zero points, each [rows, groups] or with sizes of 1."""
        values = self.files.read(self.weight_name)[first:last]
        if values.dtype != torch.int8:
            raise ValueError(f"{self.weight_name} is stored as {values.dtype}, its quantization_config asks for int8")
        scales = self._by_group(self.scale_name, first, last)
        return values, scales, None if self.zeros_name is None else self._by_group(self.zeros_name, first, last)

    def _by_group(self, name: str, first: int, last: int) -> Tensor:
        tensor = self.files.read(name).float()
        return tensor.view(1, 1) if tensor.numel() == 1 else tensor.view(self.shape[0], -1)[first:last]
