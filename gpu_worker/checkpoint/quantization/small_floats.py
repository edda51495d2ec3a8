"""Reads weights that are stored as small floats with scales: FP8 and MXFP4.

FP8 has one scale for the tensor, for each output channel, or for each block of outputs and inputs. Activations keep the
model's dtype, which is more precise than the FP8 activations that some of these checkpoints were made for. Only on GPUs
whose tensor cores multiply 8-bit floats are those of such checkpoints rounded.

MXFP4 has numbers of 4 bits, floats themselves (e2m1), of which 32 share a power of two (e8m0). For all experts of a
layer, a matrix of ``in`` inputs and ``out`` outputs has ``_blocks`` uint8 [experts, out, in / 32, 16], two numbers a
byte, the first in the lower half, and ``_scales`` uint8 [experts, out, in / 32].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.fused_experts import PARTS
from ..files.quantized_weight import Float4Weight, FloatWeight, QuantizedWeight
from .entries import Fp8, Mxfp4
from .scheme import Found, TensorFiles, check_part, part_shape

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class PackedFloats:
    """Fulfils :class:`~..files.quantized_weight.PackedWeight` with 8-bit floats, which are not integers in groups."""

    files: TensorFiles
    weight_name: str
    scale_name: str
    shape: tuple[int, int]
    block: tuple[int, int]
    """How many outputs and inputs share a scale."""
    rounds_inputs: bool
    bits: int = 8
    group: None = None
    has_offsets: bool = False

    def rows(self, first: int, last: int) -> Tensor:
        by_row, inputs = self._scales(first, last), self.block[1]
        by_input = by_row if by_row.shape[1] == 1 else by_row[:, torch.arange(self.shape[1]) // inputs]
        return self._values()[first:last].float() * by_input

    def quantized(self) -> QuantizedWeight:
        raise AssertionError("8-bit floats are not integers in groups")

    def floats(self) -> FloatWeight | None:
        """Return the whole weight as it is stored; None: in a format of which no kernel knows (e5m2)."""
        values = self._values()
        if values.dtype != torch.float8_e4m3fn:
            return None
        return FloatWeight(values, self._scales(0, self.shape[0]), self.block[1])

    def _values(self) -> Tensor:
        weight = self.files.read(self.weight_name)
        if weight.dtype not in _DTYPES:
            raise ValueError(f"{self.weight_name} is stored as {weight.dtype}, but has a scale: FP8 is expected")
        return weight

    def _scales(self, first: int, last: int) -> Tensor:
        """Return those of some outputs, [last - first, groups of inputs] float32."""
        outputs = self.block[0]
        stored = self.files.read(self.scale_name)
        # Scales that are powers of two may be stored as their exponents (e8m0), then without a dtype of their own.
        scales = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
        return scales.view(-(-self.shape[0] // outputs), -1)[torch.arange(first, last) // outputs]


def find_fp8(entries: Fp8, files: TensorFiles) -> Mapping[str, Found]:
    """Return the quantized weights, as :mod:`.scheme` says."""
    found = {}
    for suffix in ("_scale", "_scale_inv"):
        ending = f".weight{suffix}"
        for name in [name.removesuffix(suffix) for name in files.names if name.endswith(ending)]:
            layer = name.removesuffix(".weight")
            parts = (name, f"{name}{suffix}", f"{layer}.input_scale", f"{layer}.activation_scale")
            found[name] = Found(find_floats(files, name, f"{name}{suffix}", entries.block, True), parts)
    return found


def find_floats(
    files: TensorFiles, weight: str, scale: str, block: tuple[int, int] | None, rounds_inputs: bool
) -> PackedFloats:
    """Return the FP8 weight with its scale. Raises ``ValueError`` if the scale has another shape."""
    outputs, inputs = shape = part_shape(files, weight)
    found = part_shape(files, scale)
    if found in ((), (1,), (1, 1)):
        block = (outputs, inputs)
    elif found in ((outputs,), (outputs, 1)):
        block = (1, inputs)
    elif block is None or found != (-(-outputs // block[0]), -(-inputs // block[1])):
        wanted = "one for the tensor or one for each output" + (f" or for each block of {list(block)}" if block else "")
        raise ValueError(f"{scale} has shape {list(found)}: the weight is {list(shape)}, a scale must be {wanted}")
    return PackedFloats(files, weight, scale, (outputs, inputs), block, rounds_inputs)


GROUP = 32
"""Inputs that share a scale."""
_HALF_BLOCK = GROUP // 2


@dataclass(frozen=True)
class StackedFloats4:
    """Fulfils :class:`~..files.quantized_weight.PackedFloats4` for one matrix of one expert, whose numbers are no
    integers in groups."""

    files: TensorFiles
    stored: str
    """The name of the matrix of all experts."""
    expert: int
    outputs: slice
    """The outputs that are this matrix's."""
    shape: tuple[int, int]
    bits: int = 4
    group: None = None
    has_offsets: bool = False
    rounds_inputs: bool = False

    def rows(self, first: int, last: int) -> Tensor:
        return self._some(first, last).dequantize()

    def quantized(self) -> QuantizedWeight:
        raise AssertionError("floats of 4 bits are not integers in groups")

    def whole(self) -> Float4Weight:
        """Return the weight as it is stored."""
        return self._some(0, self.shape[0])

    def _some(self, first: int, last: int) -> Float4Weight:
        return Float4Weight(self._read("_blocks", first, last).flatten(1), self._read("_scales", first, last))

    def _read(self, part: str, first: int, last: int) -> Tensor:
        tensor = self.files.read(f"{self.stored}{part}")
        if tensor.dtype != torch.uint8:
            raise ValueError(f"{self.stored}{part} is stored as {tensor.dtype}, its quantization_config asks for uint8")
        return tensor[self.expert, self.outputs][first:last]


def find_mxfp4(entries: Mxfp4, files: TensorFiles) -> Mapping[str, Found]:
    """Return the quantized weights, as :mod:`.scheme` says."""
    ending = "_blocks"
    stored = [name.removesuffix(ending) for name in files.names if name.endswith(ending)]
    return dict(found for name in stored for found in _find(files, name))


def _find(files: TensorFiles, stored: str) -> Iterator[tuple[str, Found]]:
    """Yield the weight of each expert, by the name that models ask for, of the matrices that are stored as one."""
    blocks, scales = f"{stored}_blocks", f"{stored}_scales"
    prefix, _, fused = stored.rpartition(".")
    shape = part_shape(files, blocks)
    if len(shape) != 4 or shape[-1] != _HALF_BLOCK:
        raise ValueError(f"{blocks} has shape {list(shape)}: blocks of MXFP4 are [experts, out, in / 32, 16]")
    experts, all_outputs, groups, _ = shape
    check_part(files, scales, experts, all_outputs, groups)
    for matrix, part in PARTS.items():
        if part.fused != fused:
            continue
        size = len(range(all_outputs)[part.outputs]), groups * GROUP
        for expert in range(experts):
            weight = StackedFloats4(files, stored, expert, part.outputs, size)
            yield f"{prefix}.{expert}.{matrix}.weight", Found(weight, (blocks, scales))
