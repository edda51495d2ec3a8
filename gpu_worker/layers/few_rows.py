"""Products of few rows with a packed matrix: where memory's speed decides, oneDNN leaves a quarter of it or more."""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_few_float_rows, load_few_rows


@dataclass(frozen=True)
class _Kind:
    """What there is for one dtype."""

    load: Callable[[], CDLL]
    most_rows: int
    """Beyond, arithmetic decides, and oneDNN is as good or better at that."""
    outputs: int
    inputs: int
    """The matrix has whole multiples of these."""
    tolerance: float


_KINDS = {
    torch.bfloat16: _Kind(load_few_rows, most_rows=32, outputs=32, inputs=32, tolerance=5e-2),
    torch.float32: _Kind(load_few_float_rows, most_rows=32, outputs=64, inputs=16, tolerance=1e-4),
}


class FewRows:
    """A view of a matrix [out, in] that oneDNN packed; ``packed`` must outlive it.

    Raises :class:`KernelsUnavailable` where there is no compiler, the CPU lacks what the kernel needs (bfloat16: the
    matrix unit; float32: AVX-512), or for shapes it does not know.
    """

    def __init__(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
        self._outputs, self._inputs = shape
        kind = _KINDS.get(packed.dtype)
        if kind is None or self._outputs % kind.outputs or self._inputs % kind.inputs:
            raise KernelsUnavailable(f"a matrix of {self._outputs} by {self._inputs} {packed.dtype}")
        if torch.ops.mkldnn._nbytes(packed) != self._outputs * self._inputs * packed.itemsize:
            raise KernelsUnavailable("oneDNN packed the matrix in some other way")
        self.most_rows = kind.most_rows
        self._tolerance = kind.tolerance
        self._multiply = kind.load().multiply
        self._matrix = torch.ops.mkldnn.data_ptr(packed)
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [1 to most_rows, in] of the matrix's dtype to ``dtype``, that one or float32.

        float32 results of bfloat16 are rounded to bfloat16 first, as many rows' are.
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
            torch.get_num_threads(),
        )
        return out

    def agrees(self, linear: "torch._ops.OpOverload", packed: Tensor) -> bool:
        """Whether the matrix lies as expected: the layout is oneDNN's own affair, so one product of it is compared."""
        x = torch.randn(1, self._inputs, generator=torch.Generator().manual_seed(0)).to(packed.dtype)
        expected = linear(x, packed, self._bias, "none", [], "").float()
        scale = float(expected.abs().max())
        return torch.allclose(self(x, torch.float32), expected, rtol=self._tolerance, atol=self._tolerance * scale)
