"""Moves several arrays of the host to a device with one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Kernels load 16 bytes at once from addresses that are multiples of it."""


def copy_packed(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return tensors of these arrays on the device, views of one allocation that one asynchronous copy fills.

    The staging memory is pinned; PyTorch keeps it until the copy is done. On the CPU it is a copy too, so the arrays
    may be reused.
    """
    begins = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    staging = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = staging.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        packed[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staging.to(device, non_blocking=True)
    views = []
    for array, begin in zip(arrays, begins, strict=False):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views.append(moved[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return views


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor on the device: the array's own memory on the CPU, and elsewhere an asynchronous copy."""
    return torch.from_numpy(array) if device.type == "cpu" else copy_packed([array], device)[0]
