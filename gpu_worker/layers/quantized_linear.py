"""Computes linear layers from weights of 4 or 8 bits.

In groups, which the kernel unpacks in registers: inputs are rounded to int8 by row and group of 32, so that an outlier
costs only its group precision. In int8 on the matrix unit (AMX): weights are rounded once, per output, and inputs at
every product, per row. Without that unit the kernel of the first kind computes them.

A row's result depends on no other row, so that a token does not depend on the batch it is computed in.
"""

import contextlib
import copy
from ctypes import CDLL
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.files.quantized_weight import Float4Weight, QuantizedWeight
from ..checkpoint.layer_state import LayerState, check_state, copy_state, present, shapes_of
from ..checkpoint.weights import Linear
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import load_int8, load_quantized
from ..kernels.threads import kernel_threads
from ..parallel.group import RankGroup
from .weight_memory import weight_memory

# By group and not by row: with one number of 300 among 512 of a normal distribution the error is below 0.4 of that of
# rounding the whole row (tests/gpu_worker/layers/test_quantized_linear.py).
GROUP = 32
"""Inputs that the kernel rounds together. Mirrors the constant in ``quantized.cpp``, as does the next."""
_PANEL = 16
_INT4, _INT8, _FLOAT4 = 4, 8, 5
"""What the numbers of a matrix are. Mirrors the constants in ``dot.h``."""
_FLOAT4_LEAST = -12
"""Twice the smallest float of 4 bits: the kernel's levels are twice the floats, and unsigned."""
_FLOAT16_MAX_EXPONENT = 15


@dataclass(frozen=True)
class Packed:
    """Holds a weight as the kernel reads it: ((number + least) * scale + offset) * factor."""

    kind: int
    """One of ``_INT4``, ``_INT8`` and ``_FLOAT4``."""
    matrix: Tensor
    """[panels, groups * fours * 16 * 4] uint8; of 4 bits half as many fours."""
    scales: Tensor
    """[panels, groups / groups_per_scale, 16] float16; of floats of 4 bits uint8, the exponents of powers of two."""
    offsets: Tensor | None
    groups_per_scale: int
    factor: float
    least: int


class QuantizedLinear:
    """Fulfils :class:`.Linear` on the CPU for float32 and bfloat16 inputs; keeps a packed copy of ``weight``.

    Raises :class:`KernelsUnavailable` without a compiler or AVX2, and for groups that are not multiples of 32.
    """

    def __init__(self, weight: QuantizedWeight | Float4Weight, bias: Tensor | None = None) -> None:
        stored = weight.blocks if isinstance(weight, Float4Weight) else weight.values
        group = GROUP if isinstance(weight, Float4Weight) else weight.group
        if group % GROUP or stored.device.type != "cpu":
            raise KernelsUnavailable(f"a weight in groups of {group} on {stored.device.type}")
        kernels = load_quantized()
        self._multiply = kernels.multiply_quantized
        self.packed = _pack_floats(weight, kernels) if isinstance(weight, Float4Weight) else _pack(weight, kernels)
        self.bias = None if bias is None else bias.float()
        self.shape = weight.shape
        """(outputs, inputs)."""

    def state(self) -> LayerState:
        packed = self.packed
        tensors = [packed.matrix, packed.scales, *present(packed.offsets, self.bias)]
        has = [float(each is not None) for each in (packed.offsets, self.bias)]
        return LayerState(tensors, [packed.kind, packed.groups_per_scale, packed.factor, packed.least, *has])

    def with_state(self, state: LayerState) -> Linear:
        kind, per_scale, factor, least, has_offsets, has_bias = map(float, (*state.numbers, *[0.0] * 6)[:6])
        _check_packed(state, self.shape)
        other, tensors = copy.copy(self), list(state.tensors)
        matrix, scales = tensors.pop(0), tensors.pop(0)
        offsets = tensors.pop(0) if has_offsets else None
        other.packed = Packed(int(kind), matrix, scales, offsets, int(per_scale), factor, int(least))
        other.bias = tensors.pop(0) if has_bias else None
        return other

    def take(self, other: Linear) -> Linear:
        if not isinstance(other, QuantizedLinear) or shapes_of(self.state()[0]) != shapes_of(other.state()[0]):
            return other
        if (self.packed.offsets is None) != (other.packed.offsets is None):
            return other
        copy_state(self.state(), other.state())
        new = other.packed
        self.packed = replace(self.packed, kind=new.kind, factor=new.factor, least=new.least)
        return self

    @property
    def bits(self) -> int:
        """Return the bits of a number of the matrix: 4 if every group's values fit, otherwise 8."""
        return _INT8 if self.packed.kind == _INT8 else 4

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        outputs, inputs = self.shape
        assert x.is_cpu, "this kernel reads memory of the host"
        packed, x = self.packed, x.contiguous()
        out = x.new_empty(len(x), outputs)
        self._multiply(
            packed.kind,
            x.dtype == torch.bfloat16,
            *(t.data_ptr() for t in (x, packed.matrix, packed.scales)),
            *(None if t is None else t.data_ptr() for t in (packed.offsets, self.bias)),
            out.data_ptr(),
            len(x),
            inputs,
            outputs,
            packed.groups_per_scale,
            packed.factor,
            packed.least,
            kernel_threads(),
        )
        return out if dtype is None else out.to(dtype)


def _check_packed(state: LayerState, shape: tuple[int, int]) -> None:
    """Raise ``ValueError`` unless the kernel can read a state of a layer with ``shape``, which another process sent."""
    outputs, inputs = shape
    if len(state.numbers) != 6:
        raise ValueError(f"a packed weight of {len(state.numbers)} numbers; it has 6")
    kind, per_scale, _, _, has_offsets, has_bias = state.numbers
    if kind not in (_INT4, _INT8, _FLOAT4) or per_scale < 1 or inputs % (GROUP * int(per_scale)):
        raise ValueError(f"a packed weight of kind {kind} in groups of {per_scale}")
    panels = -(-outputs // _PANEL)
    bits = 8 if kind == _INT8 else 4
    scales = (panels, inputs // GROUP // int(per_scale), _PANEL)
    dtype = torch.uint8 if kind == _FLOAT4 else torch.float16
    shapes = [(torch.uint8, (panels, _PANEL * inputs * bits // 8)), (dtype, scales)]
    shapes += [(torch.float16, scales)] * bool(has_offsets) + [(torch.float32, (outputs,))] * bool(has_bias)
    check_state(state, shapes, 6)


def _pack(weight: QuantizedWeight, kernels: CDLL) -> Packed:
    outputs, inputs = weight.shape
    scales, offsets = weight.scales, weight.offsets
    least, bits = _range(weight)
    matrix = weight_memory.empty(-(-outputs // _PANEL), _PANEL * inputs * bits // 8, dtype=torch.uint8).zero_()
    values, threads = weight.values.contiguous(), kernel_threads()
    kernels.pack_quantized(bits, values.data_ptr(), matrix.data_ptr(), outputs, inputs, least, threads)
    factor = _power_of_two(scales, offsets)
    halves = None if offsets is None else _halves(offsets, factor)
    return Packed(bits, matrix, _halves(scales, factor), halves, weight.group // GROUP, factor, least)


def _pack_floats(weight: Float4Weight, kernels: CDLL) -> Packed:
    outputs, inputs = weight.shape
    matrix = weight_memory.empty(-(-outputs // _PANEL), _PANEL * inputs // 2, dtype=torch.uint8).zero_()
    kernels.pack_float4(weight.blocks.contiguous().data_ptr(), matrix.data_ptr(), outputs, inputs, kernel_threads())
    exponents = weight_memory.copy(_by_panel(weight.exponents))
    return Packed(_FLOAT4, matrix, exponents, None, 1, 0.5, _FLOAT4_LEAST)


def _range(weight: QuantizedWeight) -> tuple[int, int]:
    """Return the number that a level of zero stands for, and how many bits hold all levels.

    The kernel's sums have 16 bits, so 4 bits hold only levels of -16 to 15.
    """
    low, high = int(weight.values.min()), int(weight.values.max())
    if high - low < 16 and low >= -16 and high < 16:
        return low, 4
    return -128, 8


def _power_of_two(scales: Tensor, offsets: Tensor | None) -> float:
    """Return a factor that brings the largest scale or offset to the top of float16's range, which loses no bits."""
    largest = max(float(t.abs().max()) for t in (scales, offsets) if t is not None)
    exponent = int(torch.frexp(torch.tensor(largest)).exponent)
    return 2.0 ** (exponent - _FLOAT16_MAX_EXPONENT)


def _halves(numbers: Tensor, factor: float) -> Tensor:
    """Return [out, groups] divided by ``factor`` as float16 [panels, groups, 16]."""
    return weight_memory.copy(_by_panel(numbers / factor).half())


def _by_panel(numbers: Tensor) -> Tensor:
    """Arrange [out, groups] as [panels, groups, 16]; zeros fill the last panel."""
    padded = torch.nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % _PANEL))
    return padded.view(-1, _PANEL, numbers.shape[1]).transpose(1, 2)


_LARGEST = 127
_BLOCK_OUTPUTS, _BLOCK_INPUTS, _FOUR = 32, 64, 4
"""Mirrors the constant in ``int8.cpp``."""
_DTYPES = (torch.bfloat16, torch.float32, torch.int8)


class Int8Linear:
    """Fulfils :class:`.Linear` on the CPU; keeps an int8 copy of ``weight`` [out, in], not the weight."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, *, by_row: bool = False
    ) -> None:
        """``scales``: [out] float32 if ``weight`` is int8, rounded before; None: it is rounded here. ``by_row``:
        inputs are rounded as :func:`rounds_rows` says of a matrix of which this is a part."""
        rounded, self._scales = round_rows(weight) if scales is None else (weight, scales)
        self._bias = None if bias is None else bias.float()
        self._shape = (weight.shape[0], weight.shape[1])
        self._kernels: CDLL | None = None
        self._grouped: QuantizedLinear | None = None
        try:
            self._kernels = _kernels(weight)
        except KernelsUnavailable as error:
            if not by_row:
                self._grouped = _in_groups(rounded, self._scales, self._bias, f"int8 layers: {error}")
        if self._grouped is None:
            self._weight = rounded.t().contiguous() if self._kernels is None else _in_blocks(rounded)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._grouped is not None:
            return self._grouped(x, dtype)
        result = self._with_torch(x) if self._kernels is None else self._with_kernels(self._kernels, x.contiguous())
        return result if dtype is None else result.to(dtype)

    def state(self) -> LayerState:
        if self._grouped is not None:
            return self._grouped.state()
        return LayerState([self._weight, self._scales, *present(self._bias)], [])

    def with_state(self, state: LayerState) -> Linear:
        other = copy.copy(self)
        if self._grouped is not None:
            grouped = self._grouped.with_state(state)
            assert isinstance(grouped, QuantizedLinear)
            other._grouped = grouped
            return other
        check_state(state, shapes_of(self.state().tensors), 0)
        other._weight, other._scales = state.tensors[:2]
        other._bias = state.tensors[2] if self._bias is not None else None
        return other

    def take(self, other: Linear) -> Linear:
        if not isinstance(other, Int8Linear) or other._grouped is not None:
            return other
        copy_state(self.state(), other.state())
        return self

    def _with_kernels(self, kernels: CDLL, x: Tensor) -> Tensor:
        assert x.is_cpu, "this kernel reads memory of the host"
        outputs, inputs = self._shape
        out = x.new_empty(len(x), outputs)
        kernels.multiply_int8(
            x.dtype == torch.bfloat16,
            *(t.data_ptr() for t in (x, self._weight, self._scales)),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            len(x),
            inputs,
            outputs,
            kernel_threads(),
        )
        return out

    def _with_torch(self, x: Tensor) -> Tensor:
        rounded, units = round_rows(x)
        result = torch._int_mm(rounded, self._weight).float() * (units[:, None] * self._scales)
        return (result if self._bias is None else result + self._bias).to(x.dtype)


class SharedInt8Linear:
    """Fulfils :class:`.Linear` on the CPU for a rank of a group of which each has a part of the inputs. Rows are
    rounded by their largest number on any rank, and integers are added, so that all get the bits of one rank's
    :class:`Int8Linear`."""

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, group: RankGroup, *, adds: bool = True
    ) -> None:
        """``weight`` [out, own inputs] int8, ``scales`` [out] float32. Without ``adds`` a call returns what this rank
        adds to the result, and the first rank adds ``bias``."""
        self.adds, self._group, self._scales = adds, group, scales.contiguous()
        self._bias = bias.float() if bias is not None and (adds or group.rank == 0) else None
        self._shape = (weight.shape[0], weight.shape[1])
        self._kernels: CDLL | None = None
        with contextlib.suppress(KernelsUnavailable):
            self._kernels = _kernels(weight)
        self._weight = weight.t().contiguous() if self._kernels is None else _in_blocks(weight)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        compute = self._with_torch if self._kernels is None else self._with_kernels
        result = compute(x.contiguous())
        return result if dtype is None else result.to(dtype)

    def _with_kernels(self, x: Tensor) -> Tensor:
        assert x.is_cpu, "this kernel reads memory of the host"
        outputs, inputs = self._shape
        kernels, is_bf16, rows = self._kernels, x.dtype == torch.bfloat16, len(x)
        assert kernels is not None, "PyTorch computes this layer"
        tops = torch.empty(rows, dtype=torch.int32)
        kernels.row_tops(is_bf16, x.data_ptr(), tops.data_ptr(), rows, inputs, kernel_threads())
        tops = self._group.all_max(tops)
        sums, out = torch.empty(rows, outputs, dtype=torch.int32), x.new_empty(rows, outputs)
        given = (x.data_ptr(), self._weight.data_ptr(), tops.data_ptr(), sums.data_ptr())
        kernels.sum_int8(is_bf16, *given, rows, inputs, outputs, kernel_threads())
        sums = self._group.all_reduce(sums) if self.adds else sums
        factors = (tops.data_ptr(), self._scales.data_ptr(), None if self._bias is None else self._bias.data_ptr())
        kernels.scale_sums(is_bf16, sums.data_ptr(), *factors, out.data_ptr(), rows, outputs, kernel_threads())
        return out

    def _with_torch(self, x: Tensor) -> Tensor:
        rounded, units = round_rows(x, largest_of_rows(x, self._group))
        sums = torch._int_mm(rounded, self._weight)
        sums = self._group.all_reduce(sums) if self.adds else sums
        result = sums.float() * (units[:, None] * self._scales)
        return (result if self._bias is None else result + self._bias).to(x.dtype)


def make_shared_int8(
    weight: Tensor, scales: Tensor, bias: Tensor | None, inputs: int, group: RankGroup, *, adds: bool
) -> "SharedInt8Linear | QuantizedLinear":
    """Make the layer of a rank that has a part of ``inputs``: ``weight`` [out, own inputs] int8, ``scales`` [out].
    One that rounds inputs in groups returns this rank's part of a sum."""
    if not rounds_rows(weight.shape[0], inputs):
        partial = bias if group.rank == 0 else None
        layer = _in_groups(weight, scales, partial, f"a part of {weight.shape[1]} inputs of an int8 layer")
        if layer is not None:
            return layer
    return SharedInt8Linear(weight, scales, bias, group, adds=adds)


def rounds_rows(outputs: int, inputs: int) -> bool:
    """Return whether the matrix unit computes with a matrix of this size, so that its inputs are rounded by row."""
    try:
        _kernels(torch.empty(outputs, inputs, dtype=torch.int8, device="meta"))
    except KernelsUnavailable:
        return False
    return True


def largest_of_rows(x: Tensor, group: RankGroup) -> Tensor:
    """Return the largest magnitude in each row of which every rank has a part, [n] float32: that of a row with NaN is
    NaN."""
    # As integers the bits of magnitudes compare as the floats do, and those of NaN are the largest.
    bits = x.float().abs().amax(dim=1).view(torch.int32)
    return group.all_max(bits).view(torch.float32)


def round_rows(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x [n, m] as int8 of the same shape, and the scale of each row, [n] float32: NaN for a row that is not
    finite. ``largest`` [n] float32: the largest magnitudes of rows of which x is a part; None: it is all of them."""
    x = x.float()
    if largest is None:
        largest = x.abs().amax(dim=1)
    # Dividing a number by a tensor multiplies by the reciprocal, which rounds differently from the kernel.
    scales = torch.where(largest > 0, torch.full_like(largest, _LARGEST) / largest, 0.0)
    units = torch.where(largest.isfinite(), largest / _LARGEST, torch.nan)
    return (x * scales[:, None]).nan_to_num().round().to(torch.int8), units


def _in_groups(values: Tensor, scales: Tensor, bias: Tensor | None, reason: str) -> QuantizedLinear | None:
    """Return a layer for processors without the matrix unit; None, with a warning, if PyTorch has to compute."""
    try:
        weight = QuantizedWeight(values, scales[:, None].contiguous(), None, group=values.shape[1])
        return QuantizedLinear(weight, bias)
    except KernelsUnavailable as error:
        if not values.is_meta:  # which a check of new weights builds, and nothing computes with
            warn_unavailable(f"{reason}; {error}")
        return None


def _in_blocks(weight: Tensor) -> Tensor:
    """Arrange [out, in] for the kernel: blocks of outputs, blocks of inputs, fours, outputs, inputs of a four."""
    outputs, inputs = weight.shape
    sizes = (outputs // _BLOCK_OUTPUTS, _BLOCK_OUTPUTS, inputs // _BLOCK_INPUTS, _BLOCK_INPUTS // _FOUR, _FOUR)
    return weight_memory.copy(weight.view(sizes).permute(0, 2, 3, 1, 4))


def _kernels(weight: Tensor) -> CDLL:
    outputs, inputs = weight.shape
    if outputs % _BLOCK_OUTPUTS or inputs % _BLOCK_INPUTS or weight.dtype not in _DTYPES:
        raise KernelsUnavailable(f"a matrix of {outputs} by {inputs} {weight.dtype}")
    return load_int8()
