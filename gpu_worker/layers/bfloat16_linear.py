"""Computes bfloat16 linear layers in panels of our own: with the instruction for pairs of bfloat16 numbers where the
processor has it, otherwise in float32 arithmetic.

Each weight of the latter becomes a float in registers, so a step reads half the bytes of float32. A row's result
depends on no other row. The panels lie in huge pages, which oneDNN's packed matrices do not.
"""

import functools
from ctypes import CDLL

import torch
from torch import Tensor

from ..kernels.compiler import KernelsUnavailable
from ..kernels.levels import processor_features
from ..kernels.library import load_bfloat16, load_bfloat16_dots
from ..kernels.threads import kernel_threads
from .weight_memory import weight_memory


@functools.cache
def outruns_onednn() -> bool:
    """Return whether the kernel is faster than oneDNN's, which reads the weights of few rows at half of the memory's
    bandwidth: on processors with AVX-512 BF16, but without the matrix unit, which only oneDNN uses for many rows."""
    if "amx_bf16" in processor_features():
        return False
    try:
        load_bfloat16_dots()
    except KernelsUnavailable:
        return False
    return True


def _load_kernels() -> CDLL:
    """Load the fastest kernels that this processor has. Raises :class:`KernelsUnavailable`."""
    try:
        return load_bfloat16_dots()
    except KernelsUnavailable:
        return load_bfloat16()


class Bfloat16Linear:
    """Fulfils :class:`.linear.Linear` on the CPU for bfloat16 inputs; keeps a packed copy of ``weight`` [out, in].

    Raises :class:`KernelsUnavailable` without a compiler, or without FMA.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            raise KernelsUnavailable(f"a matrix of {weight.dtype} on {weight.device.type}")
        kernels = _load_kernels()
        self._multiply = kernels.multiply_bfloat16
        self._shape = (weight.shape[0], weight.shape[1])
        self._word_inputs: int = kernels.word_inputs()
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
        panels, depth, words, _ = self._weight.shape
        if (
            self._word_inputs == 1
        ):  # a word holds an input of one output of the panel's first half, and one of its second
            return self._weight.permute(0, 3, 2, 1).reshape(panels * 2 * words, inputs)[:outputs]
        return self._weight.permute(0, 2, 1, 3).reshape(panels * words, 2 * depth)[:outputs, :inputs]


def _in_panels(weight: Tensor, kernels: CDLL) -> Tensor:
    """Arrange [out, in] for the kernel as [panels, inputs or pairs of them, words of a panel, 2]."""
    outputs, inputs = weight.shape
    panel, word_inputs = kernels.panel_outputs(), kernels.word_inputs()
    shape = -(-outputs // panel), -(-inputs // word_inputs), panel * word_inputs // 2, 2
    packed = weight_memory.empty(*shape, dtype=torch.bfloat16)
    weight = weight.contiguous()
    kernels.pack_bfloat16(weight.data_ptr(), packed.data_ptr(), outputs, inputs, kernel_threads())
    return packed
