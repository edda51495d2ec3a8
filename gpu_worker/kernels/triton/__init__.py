"""Kernels for NVIDIA GPUs in Triton, one a module, and what launches them: every launch of the package goes through
:func:`launch`. Only what computes on a GPU imports these modules.

Triton compiles a kernel again for each kind of argument: whether 16 divides an integer or an address, and whether an
integer is 1. So what differs between steps is marked ``do_not_specialize``, and arrays of steps begin at multiples of
16 bytes: whatever compiles while requests wait costs them seconds. ``tests/gpu_worker/kernels/triton/test_compiles.py``
counts it.
"""

from typing import Any

from torch import Tensor

Grid = tuple[int, ...]


def launch(kernel: Any, grid: Grid, *arguments: Tensor | float | None, **constants: Any) -> None:
    """Run ``kernel`` over ``grid`` on the current stream of the thread's GPU, which must be that of the tensors.

    ``constants`` are the kernel's ``constexpr`` parameters and Triton's options, such as ``num_warps``. A grid without
    programs launches nothing.
    """
    if all(grid):
        kernel[grid](*arguments, **constants)


def power_of_2(size: int, least: int = 1) -> int:
    """Return the least power of two that is at least ``size`` and ``least``."""
    return max(least, 1 << max(0, size - 1).bit_length())
