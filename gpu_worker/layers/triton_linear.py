"""Computes linear layers on a GPU: few rows with a Triton kernel that streams the weights, more rows with cuBLAS."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.triton.few_rows import MOST_ROWS, few_rows
from ..kernels.triton.launch import launch

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


class TritonLinear:
    """Fulfils :class:`.linear.Linear` on a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel computes these rows: at most 16, of 16 bits. Others are cuBLAS's."""
        return len(x) <= MOST_ROWS and x.dtype in _DTYPES

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.takes(x):
            return self._few_rows(x, len(self._weight), "none", dtype or x.dtype)
        result = F.linear(x, self._weight, self._bias)
        return result if dtype is None else result.to(dtype)

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]."""
        return self._weight

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up [n, out / 2] for rows that it :meth:`takes`; gates are the first outputs."""
        return self._few_rows(x, len(self._weight) // 2, KINDS[activation], x.dtype)

    def _few_rows(self, x: Tensor, outputs: int, kind: str, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        inputs = x.shape[1]
        # With gates a program reads two rows of weights for each output.
        columns = 16 if kind != "none" else 32 if outputs < 1 << 15 else 64
        out = torch.empty(len(x), outputs, dtype=dtype, device=x.device)
        launch(
            few_rows,
            (-(-outputs // columns),),
            x,
            self._weight,
            x if self._bias is None else self._bias,
            out,
            len(x),
            inputs,
            outputs,
            HAS_BIAS=self._bias is not None,
            KIND=kind,
            EVEN=inputs % _DEPTH == 0 and outputs % columns == 0,
            COLUMNS=columns,
            DEPTH=_DEPTH,
            num_warps=4,
            num_stages=_STAGES,
        )
        return out
