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
from .fp8 import find_floats
from .scheme import Codes, Found, PackedCodes, TensorFiles, check_part, find_layers, groups_of, packed_codes, part_shape


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
            weight = find_floats(files, parts["weight"], parts["weight_scale"], entries.block)
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
    order = files.read(parts["weight_g_idx"]) if parts["weight_g_idx"] in files.names else None
    if order is not None and int(order.min()) == -1:  # as written for layers without such an order
        order = None

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
    return PackedIntegers(
        files, parts["weight"], parts["weight_scale"], zeros, (outputs, inputs), group, entries.int8_inputs
    )


@dataclass(frozen=True)
class PackedIntegers:
    """Fulfils :class:`~..files.quantized_weight.PackedWeight` with a weight that is stored as int8."""

    files: TensorFiles
    weight_name: str
    scale_name: str
    zeros_name: str | None
    shape: tuple[int, int]
    group: int
    rounds_inputs: bool
    bits: int = 8

    @property
    def has_offsets(self) -> bool:
        return self.zeros_name is not None

    def rows(self, first: int, last: int) -> Tensor:
        return self._some(first, last).dequantize()

    def quantized(self) -> QuantizedWeight:
        return self._some(0, self.shape[0])

    def _some(self, first: int, last: int) -> QuantizedWeight:
        values = self.files.read(self.weight_name)[first:last]
        if values.dtype != torch.int8:
            raise ValueError(f"{self.weight_name} is stored as {values.dtype}, its quantization_config asks for int8")
        scales = self._by_group(self.scale_name, first, last)
        offsets = None if self.zeros_name is None else -self._by_group(self.zeros_name, first, last) * scales
        return QuantizedWeight(values, scales, offsets, self.group)

    def _by_group(self, name: str, first: int, last: int) -> Tensor:
        tensor = self.files.read(name).float()
        if tensor.numel() == 1:
            return tensor.view(1, 1).expand(last - first, self.shape[1] // self.group).contiguous()
        return tensor.view(self.shape[0], -1)[first:last].contiguous()
