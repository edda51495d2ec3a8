"""Products of few rows with a packed bfloat16 matrix: where memory's speed decides, oneDNN leaves a quarter of it."""

import torch
from torch import Tensor

from .kernels.compiler import KernelsUnavailable
from .kernels.library import load_few_rows

MOST_ROWS = 32
"""Beyond, arithmetic decides, and oneDNN is better at that."""
_MULTIPLE = 32
_TOLERANCE = 5e-2


class FewRows:
    """A view of a matrix [out, in] that oneDNN packed; ``packed`` must outlive it.

    Raises :class:`KernelsUnavailable` where there is no compiler or no matrix unit, or for shapes it does not know.
    """

    def __init__(self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
        self._outputs, self._inputs = shape
        if self._outputs % _MULTIPLE or self._inputs % _MULTIPLE or packed.dtype != torch.bfloat16:
            raise KernelsUnavailable(f"a matrix of {self._outputs} by {self._inputs} {packed.dtype}")
        if torch.ops.mkldnn._nbytes(packed) != self._outputs * self._inputs * packed.itemsize:
            raise KernelsUnavailable("oneDNN packed the matrix in some other way")
        self._multiply = load_few_rows().multiply
        self._matrix = torch.ops.mkldnn.data_ptr(packed)
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [1 to 32, in] bfloat16; float32 results are rounded to bfloat16 first, as many rows' are."""
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
        x = torch.randn(1, self._inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
        expected = linear(x, packed, self._bias, "none", [], "").float()
        scale = float(expected.abs().max())
        return torch.allclose(self(x, torch.float32), expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale)
