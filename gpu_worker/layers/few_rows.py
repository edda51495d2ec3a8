"""Multiplies few bfloat16 rows with a packed matrix. Memory bandwidth is the limit; oneDNN misses it by a quarter."""

import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_few_rows
from ..kernels.threads import kernel_threads

MOST_ROWS = 32
"""With more rows arithmetic is the limit, and oneDNN is as fast or faster."""
_BLOCK = 32
_TOLERANCE = 5e-2


class FewRows:
    """Views a bfloat16 matrix [out, in] that oneDNN packed; ``packed`` must outlive it.

    Raises :class:`KernelsUnavailable` without a compiler, if the CPU lacks the matrix unit, and for shapes that the
    kernel does not support.
    """

    def __init__(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
        self._outputs, self._inputs = shape
        if packed.dtype != torch.bfloat16 or self._outputs % _BLOCK or self._inputs % _BLOCK:
            raise KernelsUnavailable(f"a matrix of {self._outputs} by {self._inputs} {packed.dtype}")
        if torch.ops.mkldnn._nbytes(packed) != self._outputs * self._inputs * packed.itemsize:
            raise KernelsUnavailable("oneDNN packed the matrix in an unknown layout")
        self._multiply = load_few_rows().multiply
        self._matrix = torch.ops.mkldnn.data_ptr(packed)
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply x [1 to MOST_ROWS, in]; the result has ``dtype``, bfloat16 or float32.

        float32 results are rounded to bfloat16 first, as oneDNN does for many rows.
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
        return torch.allclose(self(x, torch.float32), expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale)


def make_few_rows(
    packed: Tensor, shape: tuple[int, int], bias: Tensor | None, linear: "torch._ops.OpOverload"
) -> FewRows | None:
    """Return what computes the same as oneDNN's ``linear`` with its packed matrix; None: no kernel does."""
    try:
        few_rows = FewRows(packed, shape, bias)
    except KernelsUnavailable:
        return None
    return few_rows if few_rows.agrees(linear, packed) else None
