"""Defines a weight that a checkpoint stores in few bits, unpacks integers that are packed into words, holds a linear
layer's weight as small integers with a scale for each group of inputs, and rounds weights to it."""

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...kernels.compiler import KernelsUnavailable
from ...kernels.library import load_quantized
from ...kernels.threads import kernel_threads
from ...parallel.sharding import Dimension, ShardedDimension, length

_LEAST, _LARGEST = -8, 7
"""The levels of four bits."""
# On random normal weights the best of the three, refined by least squares, has a relative error of 0.0816; mapping the
# largest number to 7 alone has 0.0945, to -8 0.0840.
_EXTREMES = (8.4, 7.9, 7.4)
"""Levels, as a positive number, to which the largest number of a group may be scaled; above 8 it is clipped."""
_AT_ONCE = 1 << 18
"""Numbers that are rounded at a time, so that the float32 copies made on the way stay in the processor's cache."""


def take_part(whole: Tensor, shape: Sequence[Dimension]) -> Tensor:
    """Return this rank's part of a tensor of a checkpoint: a view of whole rows, otherwise a contiguous copy."""
    part = whole
    for number, dimension in enumerate(shape):
        if not isinstance(dimension, int):
            runs = [part.narrow(number, first, end - first) for first, end in dimension.ranges]
            part = (runs[0] if len(runs) == 1 else torch.cat(runs, number)).contiguous()
    return part


def _part_of_groups(groups: Tensor, group: int, outputs: Dimension, inputs: Dimension) -> tuple[Tensor, int]:
    """Return the entries [out, groups] of these outputs and inputs, and how many inputs share one. A part that begins
    or ends within a group has smaller groups, several of which share an entry."""
    if isinstance(inputs, int) or groups.shape[1] == 1:  # one group of all inputs is each part's
        return take_part(groups, (outputs, groups.shape[1])), min(group, length(inputs))
    step = math.gcd(group, *(border for borders in inputs.ranges for border in borders))
    groups = groups.repeat_interleave(group // step, dim=1) if step < group else groups
    runs = tuple((first // step, end // step) for first, end in inputs.ranges)
    return take_part(groups, (outputs, ShardedDimension(groups.shape[1], runs))), step


@dataclass(frozen=True)
class QuantizedWeight:
    """Holds a weight [out, in]: weight[o, i] ≈ values[o, i] * scales[o, i // group] + offsets[o, i // group]."""

    values: Tensor
    """[out, in] int8."""
    scales: Tensor
    """[out, in / group] float32; negative scales are valid."""
    offsets: Tensor | None
    """[out, in / group] float32; None: all zero."""
    group: int
    """How many inputs share a scale; divides in."""

    def __post_init__(self) -> None:
        outputs, inputs = self.values.shape
        expected = (outputs, inputs // self.group)
        if self.values.dtype != torch.int8 or inputs % self.group:
            raise ValueError(f"values must be int8 in whole groups of {self.group}, not {self._describe(self.values)}")
        for name, tensor in (("scales", self.scales), ("offsets", self.offsets)):
            if tensor is not None and (tensor.dtype != torch.float32 or tuple(tensor.shape) != expected):
                raise ValueError(f"{name} must be float32 {list(expected)}, not {self._describe(tensor)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [out, in] in ``dtype``, computed in float32."""
        outputs, inputs = self.shape
        grouped = self.values.view(outputs, inputs // self.group, self.group).float() * self.scales[..., None]
        if self.offsets is not None:
            grouped += self.offsets[..., None]
        return grouped.view(outputs, inputs).to(dtype)

    def part(self, outputs: Dimension, inputs: Dimension) -> "QuantizedWeight":
        """Return the weight of these outputs and inputs."""
        scales, group = _part_of_groups(self.scales, self.group, outputs, inputs)
        offsets = None
        if self.offsets is not None:
            offsets, _ = _part_of_groups(self.offsets, self.group, outputs, inputs)
        return QuantizedWeight(take_part(self.values, (outputs, inputs)), scales, offsets, group)

    @staticmethod
    def _describe(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True)
class FloatWeight:
    """Holds a weight [out, in] of 8-bit floats: weight[o, i] = values[o, i] * scales[o, i // group]."""

    values: Tensor
    """[out, in] float8_e4m3fn."""
    scales: Tensor
    """[out, ceil(in / group)] float32."""
    group: int
    """How many inputs share a scale."""

    def part(self, outputs: Dimension, inputs: Dimension) -> "FloatWeight":
        """Return the weight of these outputs and inputs."""
        scales, group = _part_of_groups(self.scales, self.group, outputs, inputs)
        return FloatWeight(take_part(self.values, (outputs, inputs)), scales, group)


_FLOATS4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The number of each code of 4 bits (e2m1)."""


@dataclass(frozen=True)
class Float4Weight:
    """Holds a weight [out, in] of floats of 4 bits (e2m1), of which 32 neighbours share a power of two (e8m0)."""

    blocks: Tensor
    """[out, in / 2] uint8: two codes a byte, the first in the lower half."""
    exponents: Tensor
    """[out, in / 32] uint8, with a bias of 127."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        return self.blocks.shape[0], 2 * self.blocks.shape[1]

    def part(self, outputs: Dimension, inputs: Dimension) -> "Float4Weight":
        """Return the weight of these outputs and inputs. Raises :class:`KernelsUnavailable` for inputs that begin or
        end within a group."""
        exponents, group = _part_of_groups(self.exponents, 32, outputs, inputs)
        if group < 32:
            raise KernelsUnavailable("a rank's inputs begin or end within 32 that share an exponent")
        return Float4Weight(_part_of_groups(self.blocks, 2, outputs, inputs)[0], exponents)

    def dequantize(self) -> Tensor:
        """Return the weight [out, in], float32."""
        blocks = self.blocks.int()
        numbers = _FLOATS4[torch.stack((blocks & 15, blocks >> 4), dim=-1)].view(*self.exponents.shape, -1)
        exponents = self.exponents.int()[..., None] - 127
        return torch.ldexp(numbers, exponents).view(self.shape)


def round_to_4_bits(weight: Tensor, group: int = 32) -> QuantizedWeight:
    """Round ``weight`` [out, in], bfloat16 or float32, to 16 levels by groups of ``group`` inputs, symmetrically.

    Each group's scale is the one of several that leaves the least squared error; it is a number that float16 can hold
    unless it is too small for that. Raises ``ValueError`` if ``group`` does not divide in.
    """
    outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"a weight of {inputs} inputs cannot be rounded in groups of {group}")
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32, device=weight.device)
    if not _round_with_kernel(weight.contiguous(), group, values, scales):
        _round_with_torch(weight, group, values, scales)
    return QuantizedWeight(values, scales, None, group)


def round_to_8_bits(weight: Tensor, group: int = 32) -> QuantizedWeight:
    """Round ``weight`` [out, in] to -127 to 127 by groups of ``group`` inputs. Raises as :func:`round_to_4_bits`."""
    outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"a weight of {inputs} inputs cannot be rounded in groups of {group}")
    values = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float32, device=weight.device)
    for some in _some_rows(outputs, inputs):
        grouped = weight[some].float().view(-1, inputs // group, group)
        exact = grouped.abs().amax(2) / 127
        half = exact.half().float()
        # Rounded up, so that no number is clipped.
        half = torch.where(half < exact, half * (1 + 2**-10), half).half().float()
        scales[some] = torch.where((half >= torch.finfo(torch.float16).tiny) & half.isfinite(), half, exact)
        inverse = torch.where(scales[some] > 0, 1 / scales[some], 0.0)
        values[some] = (grouped * inverse[..., None]).round_().clamp_(-127, 127).view(-1, inputs).to(torch.int8)
    return QuantizedWeight(values, scales, None, group)


def _some_rows(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // inputs)
    return (slice(first, first + step) for first in range(0, outputs, step))


def _round_with_kernel(weight: Tensor, group: int, values: Tensor, scales: Tensor) -> bool:
    """Fill values and scales, as :func:`_round_with_torch` but some 15 times as fast; return whether a kernel can."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or group % 32:
        return False
    try:
        kernels = load_quantized()
    except KernelsUnavailable:
        return False
    extremes = (ctypes.c_float * len(_EXTREMES))(*_EXTREMES)
    kernels.round_to_4_bits(
        weight.dtype == torch.bfloat16,
        weight.data_ptr(),
        scales.numel(),
        group,
        extremes,
        len(extremes),
        values.data_ptr(),
        scales.data_ptr(),
        kernel_threads(),
    )
    return True


def _round_with_torch(weight: Tensor, group: int, values: Tensor, scales: Tensor) -> None:
    outputs, inputs = weight.shape
    for some in _some_rows(outputs, inputs):
        some_values, some_scales = _round_groups(weight[some].float().view(-1, group))
        values[some], scales[some] = some_values.view(-1, inputs), some_scales.view(-1, inputs // group)


def _round_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, group] float32 as int8 of the same shape, and the scale of each group, [n] float32."""
    extremes = x.gather(1, x.abs().argmax(dim=1, keepdim=True))
    gained, scales = torch.full_like(extremes, -1.0), torch.zeros_like(extremes)
    for extreme in _EXTREMES:
        levels = _round(x, extremes / -extreme)
        # The best scale for these levels is xᵀl / lᵀl; it lessens the squared error by (xᵀl)² / lᵀl.
        product, square = (x * levels).sum(1, keepdim=True), (levels * levels).sum(1, keepdim=True).clamp(min=1.0)
        gain = product * product / square
        scales = torch.where(gain > gained, product / square, scales)
        gained = torch.maximum(gain, gained)
    half = scales.half().float()
    fits = (half.abs() >= torch.finfo(torch.float16).tiny) & half.isfinite()
    scales = torch.where(fits, half, scales)
    return _round(x, scales).to(torch.int8), scales


def _round(x: Tensor, scales: Tensor) -> Tensor:
    inverse = torch.where(scales != 0, 1.0 / scales, 0.0)
    return (x * inverse).round_().clamp_(_LEAST, _LARGEST)


ROW_STEP = 64
"""Rows are unpacked in multiples of this number, so that no word is split: every format packs fewer rows in a word."""

AT_ONCE = 1 << 18
"""About how many numbers are unpacked at a time when the result is a plain tensor."""


# GPTQ, AWQ, compressed-tensors, FP8 and GGUF store a matrix in five ways, and models and kernels read none of them: an
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
        """Return whether the checkpoint was made for inputs that are rounded to 8 bits row by row."""

    def rows(self, first: int, last: int) -> Tensor:
        """Return the rows from ``first``, a multiple of ``ROW_STEP``, up to ``last``: [last - first, in] float32."""

    def quantized(self) -> QuantizedWeight:
        """Return the whole weight as integers; only valid if ``group`` is not None."""


@runtime_checkable
class PackedFloats4(Protocol):
    """Describes a :class:`PackedWeight` whose numbers are floats of 4 bits."""

    def whole(self) -> Float4Weight:
        """Return the weight as it is stored."""


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


def fill_rows(
    packed: PackedWeight, dtype: torch.dtype, device: torch.device, outputs: Dimension | None = None
) -> Tensor:
    """Return these rows of the weight in ``dtype``, [out, in], by default all; unpacks some rows at a time, so that
    copies made on the way stay small."""
    count, inputs = packed.shape
    outputs = count if outputs is None else outputs
    result = torch.empty(length(outputs), inputs, dtype=dtype, device=device)
    step, done = max(ROW_STEP, AT_ONCE // inputs // ROW_STEP * ROW_STEP), 0
    for begin, end in ((0, count),) if isinstance(outputs, int) else outputs.ranges:
        for first in range(begin // ROW_STEP * ROW_STEP, end, step):
            last = min(first + step, count)
            own = packed.rows(first, last)[max(begin - first, 0) : end - first]
            result[done : done + len(own)] = own
            done += len(own)
    return result
