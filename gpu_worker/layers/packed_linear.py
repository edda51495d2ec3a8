"""Computes linear layers with weights in the layout that oneDNN's kernels read.

Packing once at load saves a reordering, or a slower kernel, at every multiplication: a step of one token reads its
weights at the memory's speed. The operations are private to PyTorch, so :func:`can_pack` tries them first.
"""

import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.levels import processor_features

_ROWS = 32
"""oneDNN chooses the layout for this number of rows. It chooses the same one from one to hundreds of rows."""
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
"""The features of x86-64 that oneDNN's bfloat16 products use."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class PackedLinear:
    """Fulfils :class:`.linear.Linear` on the CPU; keeps a packed copy of ``weight`` [out, in], not the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.inference_mode(False):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        result: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return result if dtype is None else result.to(dtype)

    def unpacked(self) -> Tensor:
        """Return a copy of the weight [out, in]."""
        weight: Tensor = self._weight.to_dense()
        return weight


@functools.cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packing works on this machine and multiplies correctly."""
    if device.type != "cpu" or dtype not in _TOLERANCE or (dtype == torch.bfloat16 and _lacks_bfloat16()):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*size, generator=generator).to(dtype) for size in ((48, 32), (48,), (3, 32)))
    try:
        found = [PackedLinear(weight, bias)(x[:rows]) for rows in (1, 3)]
    except (AttributeError, RuntimeError, TypeError):  # another version of PyTorch, or a CPU that oneDNN refuses
        return False
    tolerance = _TOLERANCE[dtype]
    expected = F.linear(x, weight, bias)
    return all(torch.allclose(y, expected[: len(y)], rtol=tolerance, atol=10 * tolerance) for y in found)


def _lacks_bfloat16() -> bool:
    """Return whether oneDNN would have to emulate bfloat16 products, which takes longer than float32 arithmetic."""
    return platform.machine() == "x86_64" and not processor_features() & _BFLOAT16
