"""Reads FP8 weights, with one scale for the tensor, for each output channel, or for each block of outputs and inputs.

Activations keep the model's dtype, which is more precise than the FP8 activations that some of these checkpoints were
made for. Only on GPUs whose tensor cores multiply 8-bit floats are those of such checkpoints rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.quantized_weight import FloatWeight, QuantizedWeight
from .entries import Fp8
from .scheme import Found, TensorFiles, part_shape

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
