"""Sends the arrays of a step to the device with one copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..device.device_link import DeviceLink, Event

_ALIGNMENT = 16
"""Kernels load 16 bytes at once from addresses that are multiples of it."""
_TWINS = 3
"""Copies that may be under way before the host waits for the oldest: those of two steps in flight and of a next one."""
_LEAST_BYTES = 1 << 16


class StepBuffers:
    """Holds memory of the device for what one step sends, with twins on the host. Belongs to one thread.

    There are several twins: the next step is written while the copy of the last one waits for its turn on the device.
    """

    def __init__(self, device: torch.device, link: DeviceLink) -> None:
        self._device = device
        self._link = link
        self._turn = 0
        self._reserve(_LEAST_BYTES)

    def _reserve(self, num_bytes: int) -> None:
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._twins = [_Twin(self._link.host_memory(num_bytes)) for _ in range(_TWINS)]

    def send(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Return the arrays on the device, whose one copy begins after what the device has been given so far.

        They hold until the next call. The arrays may be reused at once.
        """
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        total = sum(sizes)
        if total > len(self._on_device):
            self._reserve(1 << (total - 1).bit_length())
        self._turn = (self._turn + 1) % _TWINS
        twin, begin, sent = self._twins[self._turn], 0, dict[str, Tensor]()
        packed = twin.begin()
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            end = begin + array.nbytes
            packed[begin:end].view(array.dtype)[:] = array.reshape(-1)
            sent[name] = self._on_device[begin:end].view(_dtype_of(array)).view(array.shape)
            begin += size
        self._link.send(self._on_device[:total], twin.memory[:total])
        twin.copied = self._link.event()
        return sent


@dataclass(slots=True)
class _Twin:
    """Holds memory of the host that the device copies from."""

    memory: Tensor
    copied: Event | None = None

    def begin(self) -> npt.NDArray[np.uint8]:
        """Return the memory to write to, once its last copy has ended."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        packed: npt.NDArray[np.uint8] = self.memory.numpy()
        return packed


_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


def _dtype_of(array: npt.NDArray[Any]) -> torch.dtype:
    return _DTYPES[array.dtype]
