"""Computes linear layers with weights of 8-bit floats (e4m3), of which each output has a scale, or several.

On a CPU a kernel widens weights as it reads them: rows keep their dtype, and a row's result depends on no other row.

On a GPU few rows are multiplied in their own dtype by a kernel that reads half the bytes of a bfloat16 weight. Of more
rows each is rounded to 8-bit floats by its own scale, and the tensor cores multiply those (``torch._scaled_mm``).
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checkpoint.files.quantized_weight import FloatWeight
from ..checkpoint.layer_state import LayerState, check_state, copy_state, present, shapes_of
from ..checkpoint.weights import Linear
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_float8, uses_triton
from ..kernels.threads import kernel_threads
from ..parallel.group import ALONE, RankGroup
from .quantized_linear import largest_of_rows
from .weight_memory import weight_memory

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
MULTIPLE = 16
"""Inputs and outputs come in whole 16s in the tensor cores' product."""
_AT_ONCE = 1 << 24
"""Numbers that are rounded at a time, because their float32 copies take four times the memory of the result."""


class Fp8Linear:
    """Fulfils :class:`.Linear`; keeps an 8-bit copy of ``weight`` [out, in], not the weight."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, group: RankGroup = ALONE
    ) -> None:
        """``scales``: [out] float32 if ``weight`` is of 8-bit floats, rounded before; None: it is rounded here.
        ``group``: the ranks of which each has a part of the inputs: rows are rounded by their largest number on any.

        Raises ``ValueError`` unless inputs and outputs are multiples of 16.
        """
        if not can_round(weight):
            raise ValueError(f"a matrix of {list(weight.shape)} has no whole {MULTIPLE}s of inputs and outputs")
        # A scale for each output, because one for the tensor lets a single outlier cost all others their precision.
        self._weight, self._scales = round_weight(weight) if scales is None else (weight, scales)
        self._bias = bias
        self._group = group
        self._has_kernel = uses_triton(weight.device)

    def state(self) -> LayerState:
        return LayerState([self._weight.view(torch.uint8), self._scales, *present(self._bias)], [])

    def with_state(self, state: LayerState) -> Linear:
        check_state(state, shapes_of(self.state().tensors), 0)
        other = copy.copy(self)
        weight, other._scales, *bias = (each.to(self._weight.device) for each in state.tensors)
        other._weight, other._bias = weight.view(FP8), bias[0] if bias else None
        return other

    def take(self, other: Linear) -> Linear:
        return other

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel for few rows computes these."""
        if not self._has_kernel:
            return False
        from .triton_linear import are_few

        return are_few(x)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # Rows of small steps keep their own precision, so tokens may differ between step sizes, as they do between
        # cuBLAS's kernels.
        if self.takes(x):
            return self._few(x, "none", dtype)
        result = self._many(x)
        return result if dtype is None else result.to(dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up [n, out / 2] for rows that it :meth:`takes`; gates are the first outputs."""
        from .triton_linear import KINDS

        return self._few(x, KINDS[activation], None)

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return weight, scales and bias."""
        return self._weight, self._scales, self._bias

    def _few(self, x: Tensor, kind: str, dtype: torch.dtype | None) -> Tensor:
        from .triton_linear import multiply_few

        return multiply_few(x, self._weight, self._scales, self._bias, kind, dtype)

    def _many(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self._weight))
        rounded, scales = self._rounded(x)
        # Scales of rows come with results in bfloat16 only; its rounding is little next to that to 8 bits.
        product = torch._scaled_mm(
            rounded, self._weight.t(), scales[:, None], self._scales[None, :], out_dtype=torch.bfloat16
        )
        result = product if self._bias is None else product + self._bias
        return result.to(x.dtype)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._group.size > 1:
            return round_rows(x, largest_of_rows(x, self._group))
        if not self._has_kernel:
            return round_rows(x)
        from .triton_linear import round_rows_at_once

        return round_rows_at_once(x)


class WidenedLinear:
    """Fulfils :class:`.Linear` on the CPU for bfloat16 inputs; keeps a packed copy of weights of which the outputs
    follow each other, in their 8 bits.

    Raises :class:`KernelsUnavailable` without a compiler or FMA, and for weights that differ in their groups.
    """

    def __init__(self, weights: Sequence[FloatWeight], bias: Tensor | None = None) -> None:
        kernels = load_float8()
        (inputs, group), *others = {(each.values.shape[1], each.group) for each in weights}
        if others:
            raise KernelsUnavailable("weights that differ in their inputs or groups")
        scales = torch.cat([each.scales for each in weights])
        if inputs % kernels.whole_inputs() or (scales.shape[1] > 1 and group % kernels.whole_inputs()):
            raise KernelsUnavailable(f"a weight of {inputs} inputs in groups of {group}")
        self._multiply, self._bias = kernels.multiply_float8, None if bias is None else bias.float()
        self._shape, self._group = (len(scales), inputs), group if scales.shape[1] > 1 else inputs
        panel = kernels.panel_outputs()
        self._scales = _in_panels(scales, panel)
        self._matrix = weight_memory.empty(-(-len(scales) // panel), panel * inputs, dtype=torch.uint8)
        parts = [each.values.view(torch.uint8) for each in weights]
        if any(len(part) % panel for part in parts[:-1]):
            parts = [torch.cat(parts)]
        first = 0
        for part in parts:
            places = (self._matrix[first].data_ptr(), self._scales[first].data_ptr())
            kernels.pack(part.contiguous().data_ptr(), *places, len(part), inputs, self._group, kernel_threads())
            first += len(part) // panel

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        assert x.is_cpu, "this kernel reads memory of the host"
        outputs, inputs = self._shape
        x = x.contiguous()
        out = x.new_empty(len(x), outputs)
        self._multiply(
            *(each.data_ptr() for each in (x, self._matrix, self._scales)),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            len(x),
            inputs,
            outputs,
            self._group,
            kernel_threads(),
        )
        return out if dtype is None else out.to(dtype)

    def state(self) -> LayerState:
        return LayerState([self._matrix, self._scales, *present(self._bias)], [self._group])

    def with_state(self, state: LayerState) -> Linear:
        check_state(state, shapes_of(self.state().tensors), 1)
        if state.numbers != [self._group]:
            raise ValueError(f"a weight in groups of {state.numbers[0]} for a layer in groups of {self._group}")
        other = copy.copy(self)
        other._matrix, other._scales, *bias = state.tensors
        other._bias = bias[0] if bias else None
        return other

    def take(self, other: Linear) -> Linear:
        if not isinstance(other, WidenedLinear):
            return other
        copy_state(self.state(), other.state())
        return self


def _in_panels(scales: Tensor, panel: int) -> Tensor:
    """Arrange [out, groups] for the kernel as [panels, groups, outputs of a panel]."""
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -len(scales) % panel))
    return weight_memory.copy(padded.view(-1, panel, scales.shape[1]).transpose(1, 2))


def can_round(weight: Tensor) -> bool:
    """Return whether the tensor cores multiply a matrix of this shape."""
    return weight.dim() == 2 and all(size and size % MULTIPLE == 0 for size in weight.shape)


def round_rows(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x [..., m] as 8-bit floats of the same shape, and the scale of each row [...] float32: a number times its
    row's scale is about the element. The scale of a row that is not finite is NaN, so that its results are.
    ``largest`` [...] float32: the largest magnitudes of rows of which x is a part; None: it is all of them."""
    exact = x.float()
    if largest is None:
        largest = exact.abs().amax(-1)
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    numbers = (exact / scales[..., None]).clamp(-_LARGEST, _LARGEST).to(FP8)
    return numbers, torch.where(largest.isfinite(), scales, torch.nan)


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [out, in] as 8-bit floats, and the scale of each output [out] float32, a part at a time."""
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        values[some], scales[some] = round_rows(weight[some])
    return values, scales
