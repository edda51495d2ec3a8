"""Multiplies few rows with a packed matrix, and any number of float32. Memory bandwidth is the limit of few rows, and
oneDNN misses it by a quarter."""

import sys
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_few_float_rows, load_few_rows
from ..kernels.threads import kernel_threads


@dataclass(frozen=True)
class Kernel:
    """Describes a kernel and the layout that it reads."""

    load: Callable[[], CDLL]
    outputs: int
    inputs: int
    """The matrix's outputs and inputs must be multiples of these."""
    tolerance: float
    most_rows: int | None = 32
    """With more rows arithmetic is the limit, and oneDNN is as fast or faster. None: any number; float32 keeps up, and
    its threads claim pieces of the work, while those of oneDNN wait for one that another program keeps from a core."""


KERNELS = {
    torch.bfloat16: Kernel(load_few_rows, outputs=32, inputs=32, tolerance=5e-2),
    torch.float32: Kernel(load_few_float_rows, outputs=64, inputs=16, tolerance=1e-4, most_rows=None),
}
"""The kernel of each dtype."""


class FewRows:
    """Views a matrix [out, in] that oneDNN packed; ``packed`` must outlive it.

    Raises :class:`KernelsUnavailable` without a compiler, if the CPU lacks what the kernel needs (bfloat16: the matrix
    unit; float32: AVX2), and for shapes that the kernel does not support.
    """

    def __init__(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None, kernel: Kernel) -> None:
        self._outputs, self._inputs = shape
        if self._outputs % kernel.outputs or self._inputs % kernel.inputs:
            raise KernelsUnavailable(f"a matrix of {self._outputs} by {self._inputs} {packed.dtype}")
        if torch.ops.mkldnn._nbytes(packed) != self._outputs * self._inputs * packed.itemsize:
            raise KernelsUnavailable("oneDNN packed the matrix in an unknown layout")
        self.most_rows = sys.maxsize if kernel.most_rows is None else kernel.most_rows
        self._tolerance = kernel.tolerance
        self._multiply = kernel.load().multiply
        self._matrix = torch.ops.mkldnn.data_ptr(packed)
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply x [1 to most_rows, in] of the matrix's dtype; the result has ``dtype``, the same or float32.

        float32 results of bfloat16 are rounded to bfloat16 first, as oneDNN does for many rows.
        """
        x = x.contiguous()
        out = torch.empty(len(x), self._outputs, dtype=dtype)
        self._multiply(
            x.data_ptr(),
            self._matrix,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            len(x),
            self._inputs,
            self._outputs,
            dtype == torch.float32,
            kernel_threads(),
        )
        return out

    def agrees(self, linear: "torch._ops.OpOverload", packed: Tensor) -> bool:
        """Return whether the layout is as expected. oneDNN does not document it, so one product is compared."""
        x = torch.randn(1, self._inputs, generator=torch.Generator().manual_seed(0)).to(packed.dtype)
        expected = linear(x, packed, self._bias, "none", [], "").float()
        scale = float(expected.abs().max())
        return torch.allclose(self(x, torch.float32), expected, rtol=self._tolerance, atol=self._tolerance * scale)


def make_few_rows(
    packed: Tensor, shape: tuple[int, int], bias: Tensor | None, linear: "torch._ops.OpOverload"
) -> FewRows | None:
    """Return what computes the same as oneDNN's ``linear`` with its packed matrix; None: no kernel does."""
    if (kernel := KERNELS.get(packed.dtype)) is None:
        return None
    try:
        few_rows = FewRows(packed, shape, bias, kernel)
    except KernelsUnavailable:
        return None
    return few_rows if few_rows.agrees(linear, packed) else None
