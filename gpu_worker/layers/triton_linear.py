"""Computes linear layers on a GPU: few rows with a Triton kernel that streams the weights, more rows with cuBLAS."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.triton.few_rows import MOST_ROWS, few_rows
from ..kernels.triton.launch import launch
from ..kernels.triton.round_rows import round_rows

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""The kernels' names of activations."""
_DTYPES = (torch.bfloat16, torch.float16)
_DEPTH = 128
"""Inputs that a program reads at a time, of each of its outputs."""
_STAGES = 5
_ROUND_WIDTH = 2048


class TritonLinear:
    """Fulfils :class:`.linear.Linear` on a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel computes these rows: at most 16, of 16 bits. Others are cuBLAS's."""
        return are_few(x)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.takes(x):
            return multiply_few(x, self._weight, None, self._bias, dtype=dtype)
        result = F.linear(x, self._weight, self._bias)
        return result if dtype is None else result.to(dtype)

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]."""
        return self._weight

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up [n, out / 2] for rows that it :meth:`takes`; gates are the first outputs."""
        return multiply_few(x, self._weight, None, self._bias, KINDS[activation])


def are_few(x: Tensor) -> bool:
    """Return whether :func:`multiply_few` computes these rows."""
    return len(x) <= MOST_ROWS and x.dtype in _DTYPES


def multiply_few(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    kind: str = "none",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias [n, out] of ``dtype``, by default that of x, or with a ``kind`` of activation
    activation(gate) * up [n, out / 2]. ``scales`` [out]: factors on a weight of 8-bit floats."""
    x = x.contiguous()
    inputs, outputs = x.shape[1], len(weight) if kind == "none" else len(weight) // 2
    # With gates a program reads two rows of weights for each output.
    columns = 16 if kind != "none" else 32 if outputs < 1 << 15 else 64
    out = torch.empty(len(x), outputs, dtype=dtype or x.dtype, device=x.device)
    launch(
        few_rows,
        (-(-outputs // columns),),
        x,
        weight,
        x if scales is None else scales,
        x if bias is None else bias,
        out,
        len(x),
        inputs,
        outputs,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        KIND=kind,
        EVEN=inputs % _DEPTH == 0 and outputs % columns == 0,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=_STAGES,
    )
    return out


def round_rows_at_once(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``fp8_linear.round_rows`` does for x [n, m], from one kernel."""
    x = x.contiguous()
    numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    launch(round_rows, (len(x),), x, numbers, scales, x.shape[1], WIDTH=_ROUND_WIDTH, num_warps=8)
    return numbers, scales
