"""Reads checkpoints of compressed-tensors: W4A16 and W8A16 packed into words, W8A8 as int8, and FP8.

Layers keep what the method calls activations in the model's dtype, unless they are computed in int8 anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..files.config_reader import ConfigReader
from ..files.quantized_weight import QuantizedWeight, unpack_words
from .fp8 import find_floats, read_block
from .scheme import Codes, Found, PackedCodes, TensorFiles, check_part, find_layers, groups_of, packed_codes, part_shape

Format = Literal["pack-quantized", "int-quantized", "float-quantized"]

HARMLESS = frozenset(("ignore", "global_compression_ratio", "version", "quantization_status"))
"""Say which layers are stored unquantized, which the tensors show, or how the checkpoint came about."""
_HARMLESS_ARGUMENTS = frozenset(("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"))
"""Say how the scales were found and stored. The order of the inputs is read from the tensor ``weight_g_idx``."""


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Fulfils :class:`.scheme.Scheme` for layers that are all stored in one format."""

    format: Format
    bits: int
    group_size: int
    """Inputs that share a scale; -1: all of an output's."""
    symmetric: bool
    block: tuple[int, int] | None
    """How many outputs and inputs share a scale of an FP8 weight; None: the scale's shape says tensor or channel."""
    int8_inputs: bool
    """Whether the checkpoint was made for inputs in int8."""

    @property
    def name(self) -> str:
        return f"compressed-tensors-{'fp' if self.format == 'float-quantized' else 'int'}{self.bits}"

    def find(self, files: TensorFiles) -> Mapping[str, Found]:
        return find_layers(files, ".weight_scale", self._find)

    def _find(self, files: TensorFiles, layer: str) -> Found:
        kinds = "weight_scale weight_packed weight_shape weight_zero_point weight_g_idx input_scale input_zero_point"
        parts = {kind: f"{layer}.{kind}" for kind in kinds.split()}
        weight: Any
        if self.format == "pack-quantized":
            weight = self._packed(files, parts)
        else:
            parts["weight"] = f"{layer}.weight"
            if self.format == "float-quantized":
                weight = find_floats(files, parts["weight"], parts["weight_scale"], self.block)
            else:
                weight = self._integers(files, parts)
        return Found(weight, tuple(parts.values()))

    def _packed(self, files: TensorFiles, parts: Mapping[str, str]) -> PackedCodes:
        check_part(files, parts["weight_shape"], 2)
        outputs, inputs = (int(size) for size in files.read(parts["weight_shape"]).tolist())
        per_word = 32 // self.bits
        check_part(files, parts["weight_packed"], outputs, -(-inputs // per_word))
        group, num_groups = groups_of(inputs, self.group_size)
        check_part(files, parts["weight_scale"], outputs, num_groups)
        if not self.symmetric:
            check_part(files, parts["weight_zero_point"], -(-outputs // per_word), num_groups)
        order = files.read(parts["weight_g_idx"]) if parts["weight_g_idx"] in files.names else None
        if order is not None and int(order.min()) == -1:  # as written for layers without such an order
            order = None

        def read(first: int, last: int) -> Codes:
            # The last word of a row is filled up when the inputs do not divide evenly.
            codes = unpack_words(files.read(parts["weight_packed"])[first:last], self.bits)[:, :inputs]
            scales = files.read(parts["weight_scale"])[first:last]
            if self.symmetric:
                return Codes(codes, None, scales)
            # The zero points are packed along the outputs.
            zeros = unpack_words(files.read(parts["weight_zero_point"]).t(), self.bits).t()
            return Codes(codes, zeros[first:last], scales)

        return packed_codes((outputs, inputs), self.bits, group, not self.symmetric, read, order)

    def _integers(self, files: TensorFiles, parts: Mapping[str, str]) -> "PackedIntegers":
        outputs, inputs = shape = part_shape(files, parts["weight"])
        group, num_groups = groups_of(inputs, self.group_size)
        scale = part_shape(files, parts["weight_scale"])
        if scale not in ((1,), (), (outputs,), (outputs, num_groups)):
            raise ValueError(
                f"{parts['weight_scale']} has shape {list(scale)}, the weight {list(shape)} asks for one scale or "
                f"{[outputs, num_groups]}"
            )
        zeros = None if self.symmetric else parts["weight_zero_point"]
        if zeros is not None and part_shape(files, zeros) != scale:
            raise ValueError(f"{zeros} has shape {list(files.shape(zeros))}, its scale has {list(scale)}")
        return PackedIntegers(
            files, parts["weight"], parts["weight_scale"], zeros, (outputs, inputs), group, self.int8_inputs
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


def read_compressed_tensors(reader: ConfigReader) -> CompressedTensors:
    """Read the entries of a ``quantization_config`` of compressed-tensors.

    Raises ``ValueError`` naming what is wrong or not supported.
    """
    for name in ("kv_cache_scheme", "transform_config"):
        if reader.take(name):
            raise reader.error(name, "is not supported: must be absent")
    sparsity = reader.take("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise reader.error("sparsity_config", "is not supported: its format must be dense")
    groups = reader.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise reader.error("config_groups", "must hold a group of layers")
    outer = reader.take("format")
    where = reader.take_object("config_groups")
    assert where is not None
    schemes = {_read_group(group, outer) for name in groups if (group := where.take_object(name)) is not None}
    if len(schemes) != 1:
        raise reader.error("config_groups", "is not supported: must store all layers in one format")
    return schemes.pop()


def _read_group(group: ConfigReader, outer_format: Any) -> CompressedTensors:
    targets = group.take("targets")
    if not isinstance(targets, list) or not targets:
        raise group.error("targets", "must be a list of layers")
    if group.take("output_activations"):
        raise group.error("output_activations", "is not supported: must be null")
    activations = group.take("input_activations")
    if activations and (not isinstance(activations, dict) or activations.get("num_bits", 8) != 8):
        raise group.error("input_activations", "must be null or have num_bits = 8")
    weights = group.take_object("weights", _HARMLESS_ARGUMENTS)
    if weights is None:
        raise group.error("weights", "must be an object")
    declared = group.take("format") or outer_format
    scheme = _read_weights(weights, group, declared, int8_inputs=bool(activations))
    weights.refuse_rest()
    group.refuse_rest()
    return scheme


def _read_weights(weights: ConfigReader, group: ConfigReader, declared: Any, *, int8_inputs: bool) -> CompressedTensors:
    bits, kind = weights.take_int("num_bits", 8), weights.take("type", "int")
    stored: Format
    match declared, kind, bits:
        case "pack-quantized", "int", 4 | 8:
            stored = "pack-quantized"
        case "int-quantized" | "naive-quantized", "int", 8:
            stored = "int-quantized"
        case "float-quantized" | "naive-quantized", "float", 8:
            stored = "float-quantized"
        case _:
            raise group.error(
                "format",
                f"is not supported: {declared!r} with weights of type {kind!r} and {bits} bits; must be pack-quantized "
                "(int, 4 or 8 bits), int-quantized (int, 8 bits) or float-quantized (float, 8 bits)",
            )
    if weights.take_bool("dynamic", False):
        raise weights.error("dynamic", "must be false: the weights are stored quantized")
    group_size, block = weights.take("group_size"), read_block(weights, "block_structure")
    strategy = weights.take("strategy") or ("group" if group_size not in (None, -1) else "channel")
    allowed = ("tensor", "channel", "block") if stored == "float-quantized" else ("tensor", "channel", "group")
    if strategy not in allowed:
        raise weights.error("strategy", f"must be one of {', '.join(allowed)}")
    size = weights.take_int("group_size") if strategy == "group" else -1
    symmetric = weights.take_bool("symmetric", True)
    return CompressedTensors(stored, bits, size, symmetric, block, int8_inputs and stored == "int-quantized")
