"""Defines how the host and a device exchange memory without waiting for each other, several arrays by one copy."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Event(Protocol):
    """Occurs once the device has done what it had been given before."""

    def query(self) -> bool:
        """Return whether it has occurred, at once."""

    def synchronize(self) -> None:
        """Wait for it."""


class DeviceLink(Protocol):
    """Copies between the host and one device. Every copy and every wait of a step passes through it."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return memory of the host, uint8, which the device reads and writes by itself."""

    def send(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source`` on the host to ``target`` on the device, after what the device has been given so far."""

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source`` on the device to ``target`` on the host, which holds nothing until a later event."""

    def event(self) -> Event:
        """Return what occurs once the device has done all that it has been given so far."""


class CUDALink:
    """Fulfils :class:`DeviceLink` on the current stream of a GPU."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event


class HostLink:
    """Fulfils :class:`DeviceLink` where the device is the host itself: what it is given is done at once."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def event(self) -> "Past":
        return Past()


class Past:
    """Fulfils :class:`Event`: it has occurred."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def link_of(device: torch.device) -> DeviceLink:
    """Return the link to a device."""
    return CUDALink() if device.type == "cuda" else HostLink()


class DeviceArray:
    """Describes memory of a GPU to PyTorch, which makes a tensor of it that neither copies nor owns it."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        """``typestr``: of the elements, as NumPy's array interface writes it."""
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def memory_on_bus(memory: Tensor, device: torch.device) -> Tensor:
    """Return pinned memory of the host, uint8, as a tensor of a GPU, whose kernels read it over the bus. It does not
    keep the memory."""
    # Pinned memory has the same address on both sides.
    return torch.as_tensor(DeviceArray(memory.data_ptr(), (memory.nbytes,), "|u1"), device=device)


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
