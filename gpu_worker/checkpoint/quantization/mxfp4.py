"""Reads MXFP4: numbers of 4 bits, floats themselves (e2m1), of which 32 share a power of two (e8m0).

For all experts of a layer, a matrix of ``in`` inputs and ``out`` outputs has ``_blocks`` uint8 [experts, out, in / 32,
16], two numbers a byte, the first in the lower half, and ``_scales`` uint8 [experts, out, in / 32].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.fused_experts import PARTS
from ..files.quantized_weight import Float4Weight, QuantizedWeight
from .entries import Mxfp4
from .scheme import Found, TensorFiles, check_part, part_shape

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
