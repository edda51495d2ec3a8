"""Computes linear layers in int8: weights are rounded once, per output, and inputs at every product, per row.

Without the matrix unit (AMX) the kernel of :mod:`.quantized_linear` computes them and rounds inputs in smaller groups.

A row's result depends on no other row, so that a token does not depend on the batch it is computed in.
"""

from ctypes import CDLL

import torch
from torch import Tensor

from ..checkpoint.files.quantized_weight import QuantizedWeight
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_int8, warn_unavailable
from ..kernels.threads import kernel_threads
from .quantized_linear import QuantizedLinear
from .weight_memory import weight_memory

_LARGEST = 127
_BLOCK_OUTPUTS, _BLOCK_INPUTS, _FOUR = 32, 64, 4
"""Mirrors the constant in ``int8.cpp``."""
_DTYPES = (torch.bfloat16, torch.float32, torch.int8)


class Int8Linear:
    """Fulfils :class:`.linear.Linear` on the CPU; keeps an int8 copy of ``weight`` [out, in], not the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> None:
        """``scales``: [out] float32 if ``weight`` is int8, rounded before; None: it is rounded here."""
        rounded, self._scales = round_rows(weight) if scales is None else (weight, scales)
        self._bias = None if bias is None else bias.float()
        self._shape = (weight.shape[0], weight.shape[1])
        self._kernels: CDLL | None = None
        self._grouped: QuantizedLinear | None = None
        try:
            self._kernels = _kernels(weight)
        except KernelsUnavailable as error:
            self._grouped = self._in_groups(rounded, f"int8 layers: {error}")
        if self._grouped is None:
            self._weight = rounded.t().contiguous() if self._kernels is None else _in_blocks(rounded)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self._grouped is not None:
            return self._grouped(x, dtype)
        result = self._with_torch(x) if self._kernels is None else self._with_kernels(self._kernels, x.contiguous())
        return result if dtype is None else result.to(dtype)

    def _in_groups(self, rounded: Tensor, reason: str) -> QuantizedLinear | None:
        """Return a layer for processors without the matrix unit; None, with a warning, if PyTorch has to compute."""
        try:
            weight = QuantizedWeight(rounded, self._scales[:, None].contiguous(), None, group=rounded.shape[1])
            return QuantizedLinear(weight, self._bias)
        except KernelsUnavailable as error:
            warn_unavailable(f"{reason}; {error}")
            return None

    def _with_kernels(self, kernels: CDLL, x: Tensor) -> Tensor:
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


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, m] as int8 of the same shape, and the scale of each row, [n] float32: NaN for a row that is not
    finite."""
    x = x.float()
    largest = x.abs().amax(dim=1)
    # Dividing a number by a tensor multiplies by the reciprocal, which rounds differently from the kernel.
    scales = torch.where(largest > 0, torch.full_like(largest, _LARGEST) / largest, 0.0)
    units = torch.where(largest.isfinite(), largest / _LARGEST, torch.nan)
    return (x * scales[:, None]).nan_to_num().round().to(torch.int8), units


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
