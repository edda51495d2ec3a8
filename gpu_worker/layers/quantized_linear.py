"""Computes linear layers from weights of 4 or 8 bits, which the kernel unpacks in registers.

Inputs are rounded to int8 by row and group of 32, so that an outlier costs only its group precision. A row's result
depends on no other row, so that a token does not depend on the batch it is computed in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_quantized
from .quantized_weight import QuantizedWeight

GROUP = 32
"""Inputs that the kernel rounds together. Mirrors the constant in ``quantized.cpp``, as do the next."""
_PANEL, _FOUR = 16, 4
_FLOAT16_MAX_EXPONENT = 15
_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class _Packed:
    """Holds a weight as the kernel reads it: ((number + least) * scale + offset) * factor."""

    bits: int
    matrix: Tensor
    """[panels, groups, fours, 16, 4] uint8; of 4 bits half as many fours."""
    scales: Tensor
    """[panels, groups, 16] float16."""
    offsets: Tensor | None
    factor: float
    least: int


class QuantizedLinear:
    """Fulfils :class:`.linear.Linear` on the CPU for float32 and bfloat16 inputs; keeps a packed copy of ``weight``.

    Raises :class:`KernelsUnavailable` without a compiler or AVX2, and for groups that are not multiples of 32.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, march: str = "native") -> None:
        if weight.group % GROUP or weight.values.device.type != "cpu":
            raise KernelsUnavailable(f"a weight in groups of {weight.group} on {weight.values.device.type}")
        self._multiply = load_quantized(march).multiply_quantized
        self._packed = _pack(weight)
        self._bias = None if bias is None else bias.float()
        self._shape = weight.shape

    @property
    def bits(self) -> int:
        """Return the bits of a number of the matrix: 4 if every group's values fit, otherwise 8."""
        return self._packed.bits

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        outputs, inputs = self._shape
        packed, x = self._packed, x.contiguous()
        out = x.new_empty(len(x), outputs)
        self._multiply(
            packed.bits,
            x.dtype == torch.bfloat16,
            *(t.data_ptr() for t in (x, packed.matrix, packed.scales)),
            *(None if t is None else t.data_ptr() for t in (packed.offsets, self._bias)),
            out.data_ptr(),
            len(x),
            inputs,
            outputs,
            packed.factor,
            packed.least,
            torch.get_num_threads(),
        )
        return out if dtype is None else out.to(dtype)


def _pack(weight: QuantizedWeight) -> _Packed:
    """Pack a weight, some outputs at a time so that the copies made on the way stay small."""
    outputs, inputs = weight.shape
    groups = inputs // GROUP
    scales, offsets = weight.scales, weight.offsets
    least, bits = _range(weight)
    panels = -(-outputs // _PANEL)
    matrix = torch.zeros(panels, groups, GROUP // _FOUR * bits // 8, _PANEL, _FOUR, dtype=torch.uint8)
    for first in range(0, outputs, _ROWS_AT_ONCE):
        levels = (weight.values[first : first + _ROWS_AT_ONCE] - least).view(torch.uint8)  # wraps around, as it should
        packed = _in_panels(levels, bits)
        matrix[first // _PANEL : first // _PANEL + len(packed)] = packed
    factor = _power_of_two(scales, offsets)
    repeat = weight.group // GROUP
    return _Packed(
        bits,
        matrix,
        _halves(scales, factor, repeat),
        None if offsets is None else _halves(offsets, factor, repeat),
        factor,
        least,
    )


def _range(weight: QuantizedWeight) -> tuple[int, int]:
    """Return the number that a level of zero stands for, and how many bits hold all levels."""
    low, high = int(weight.values.min()), int(weight.values.max())
    if high - low < 16:
        return low, 4
    return -128, 8


def _in_panels(levels: Tensor, bits: int) -> Tensor:
    """Arrange [out, in] uint8 as panels, groups, fours, outputs, inputs of a four; fill the last panel with zeros."""
    outputs, inputs = levels.shape
    panels = -(-outputs // _PANEL)
    if panels * _PANEL != outputs:
        levels = torch.nn.functional.pad(levels, (0, 0, 0, panels * _PANEL - outputs))
    # Moving fours as one number each is four times as fast as moving bytes.
    fours = levels.view(torch.int32).view(panels, _PANEL, inputs // GROUP, GROUP // _FOUR).permute(0, 2, 3, 1)
    blocks = fours.contiguous().view(torch.uint8).view(panels, inputs // GROUP, GROUP // _FOUR, _PANEL, _FOUR)
    return blocks if bits == 8 else blocks[:, :, 0::2] | blocks[:, :, 1::2] << 4


def _power_of_two(scales: Tensor, offsets: Tensor | None) -> float:
    """Return a factor that brings the largest scale or offset to the top of float16's range, which loses no bits."""
    largest = max(float(t.abs().max()) for t in (scales, offsets) if t is not None)
    exponent = int(torch.frexp(torch.tensor(largest)).exponent)
    return 2.0 ** (exponent - _FLOAT16_MAX_EXPONENT)


def _halves(numbers: Tensor, factor: float, repeat: int) -> Tensor:
    """Return [out, groups] divided by ``factor`` as float16 [panels, groups * repeat, 16]."""
    outputs = len(numbers)
    padded = torch.nn.functional.pad(numbers / factor, (0, 0, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, numbers.shape[1]).transpose(1, 2).repeat_interleave(repeat, 1).half().contiguous()
