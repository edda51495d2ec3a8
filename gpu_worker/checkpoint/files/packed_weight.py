"""Defines a weight that a checkpoint stores in few bits, and unpacks integers that are packed into words."""

import sys
from typing import Protocol

import torch
from torch import Tensor

from .quantized_weight import QuantizedWeight

ROW_STEP = 64
"""Rows are unpacked in multiples of this number, so that no word is split: every format packs fewer rows in a word."""

AT_ONCE = 1 << 18
"""About how many numbers are unpacked at a time when the result is a plain tensor."""


# GPTQ, AWQ, compressed-tensors, FP8 and GGUF store a matrix in five ways, and models and kernels know none of them: an
# architecture loads every method. Unpacking waits for the layer, so loading takes the result and one layer.
class PackedWeight(Protocol):
    """Describes a weight [out, in] of a checkpoint's file, which is unpacked only when it is asked for."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""

    @property
    def bits(self) -> int:
        """Return how many bits each number of :meth:`quantized` has."""

    @property
    def group(self) -> int | None:
        """Return how many inputs share a scale; None: the weight is not made of integers in whole groups of inputs."""

    @property
    def has_offsets(self) -> bool:
        """Return whether the groups have offsets in addition to scales."""

    @property
    def rounds_inputs(self) -> bool:
        """Return whether the checkpoint was made for inputs that are rounded to int8 row by row."""

    def rows(self, first: int, last: int) -> Tensor:
        """Return the rows from ``first``, a multiple of ``ROW_STEP``, up to ``last``: [last - first, in] float32."""

    def quantized(self) -> QuantizedWeight:
        """Return the whole weight as integers; only valid if ``group`` is not None."""


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of ``bits`` (4 or 8) that int32 ``words`` [n, m] hold, the lowest bits first.

    The result is uint8 [n, m * 32 / bits].
    """
    assert sys.byteorder == "little", "the bytes of a word are read in memory order"
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    pairs = torch.empty(*octets.shape, 2, dtype=torch.uint8, device=words.device)
    torch.bitwise_and(octets, 15, out=pairs[..., 0])
    torch.bitwise_right_shift(octets, 4, out=pairs[..., 1])
    return pairs.flatten(1)


def from_codes(codes: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Return the weight (codes - zeros) * scales, centred so that its values fit int8.

    Args:
        codes: [out, in] uint8, below 2 ** bits.
        zeros: [out, in / group] uint8, or None: every zero point is 2 ** (bits - 1).
        scales: [out, in / group], any floating dtype.
        bits: 4 to 8.
        group: Inputs that share a scale; divides in.
    """
    middle = 1 << (bits - 1)
    values = (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - middle
    scales = scales.float().contiguous()
    offsets = None
    if zeros is not None and not bool((zeros == middle).all()):
        offsets = (middle - zeros.float()) * scales
    return QuantizedWeight(values, scales, offsets, group)


def fill_rows(packed: PackedWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the whole weight [out, in] in ``dtype``; unpacks some rows at a time, so that copies made on the way stay
    small."""
    outputs, inputs = packed.shape
    result = torch.empty(outputs, inputs, dtype=dtype, device=device)
    step = max(ROW_STEP, AT_ONCE // inputs // ROW_STEP * ROW_STEP)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        result[first:last] = packed.rows(first, last)
    return result
