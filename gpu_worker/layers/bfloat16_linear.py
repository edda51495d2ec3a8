"""Computes bfloat16 linear layers on processors without bfloat16 instructions, whose products oneDNN cannot pack.

Each weight becomes a float in registers, so a step reads half the bytes of float32. A row's result depends on no other
row.
"""

from ctypes import CDLL

import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_bfloat16
from ..kernels.threads import kernel_threads
from .weight_memory import weight_memory


class Bfloat16Linear:
    """Fulfils :class:`.linear.Linear` on the CPU for bfloat16 inputs; keeps a packed copy of ``weight`` [out, in].

    Raises :class:`KernelsUnavailable` without a compiler or FMA.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            raise KernelsUnavailable(f"a matrix of {weight.dtype} on {weight.device.type}")
        kernels = load_bfloat16()
        self._multiply = kernels.multiply_bfloat16
        self._shape = (weight.shape[0], weight.shape[1])
        self._weight = _in_panels(weight, kernels)
        self._bias = None if bias is None else bias.float()
        self._weight_at = self._weight.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        outputs, inputs = self._shape
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, outputs)
        self._multiply(
            x.data_ptr(),
            self._weight_at,
            self._bias_at,
            out.data_ptr(),
            rows,
            inputs,
            outputs,
            kernel_threads(),
        )
        return out if dtype is None else out.to(dtype)

    def take(self, other: "Bfloat16Linear") -> None:
        """Copy the weight of another layer of the same shape, without a bias, to where this one has its own."""
        self._weight.copy_(other._weight)

    def unpacked(self) -> Tensor:
        """Return a copy of the weight [out, in]."""
        outputs, inputs = self._shape
        panels, _, panel = self._weight.shape
        # Of each input, a panel holds pairs of outputs of its first and its second half.
        halves = self._weight.view(panels, inputs, panel // 2, 2).permute(0, 3, 2, 1)
        return halves.reshape(panels * panel, inputs)[:outputs]


def _in_panels(weight: Tensor, kernels: CDLL) -> Tensor:
    """Arrange [out, in] for the kernel as [panels, in, outputs of a panel]."""
    outputs, inputs = weight.shape
    panel = kernels.panel_outputs()
    packed = weight_memory.empty(-(-outputs // panel), inputs, panel, dtype=torch.bfloat16)
    weight = weight.contiguous()
    kernels.pack_bfloat16(weight.data_ptr(), packed.data_ptr(), outputs, inputs, kernel_threads())
    return packed
