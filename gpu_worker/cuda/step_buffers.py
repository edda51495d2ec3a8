"""Holds the arrays of a step where a captured graph reads them, with a twin on the host: one copy fills them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
_TWINS = 3
"""Copies that may be under way before the host waits for the oldest."""

Layout: TypeAlias = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""Name, dtype and shape of each array."""


class StepBuffers:
    """Holds named arrays in one allocation of the device. Belongs to one thread.

    The host's twin is pinned, and there are several of them: the next step is written while the copy of the last one
    waits for its turn on the device.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in layout.values()]
        begins = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        self._on_gpu = device.type == "cuda"
        self._device = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
        self._twins = [_Twin.make(layout, begins, pinned=self._on_gpu) for _ in range(_TWINS if self._on_gpu else 1)]
        self._turn = 0
        self.tensors: dict[str, Tensor] = {}
        """The arrays on the device."""
        for (name, (dtype, shape)), begin, size in zip(layout.items(), begins, sizes, strict=False):
            kind = torch.from_numpy(np.empty(0, dtype=dtype)).dtype
            self.tensors[name] = self._device[begin : begin + size].view(kind).view(shape)

    def begin(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the arrays on the host to write the next step to. They hold an earlier step."""
        self._turn = (self._turn + 1) % len(self._twins)
        twin = self._twins[self._turn]
        if twin.copied is not None:
            twin.copied.synchronize()
        return twin.arrays

    def send(self) -> None:
        """Copy what was written since :meth:`begin` to the device, after what it has been given to do so far."""
        twin = self._twins[self._turn]
        self._device.copy_(twin.memory, non_blocking=True)
        if self._on_gpu:
            twin.copied = twin.copied or torch.cuda.Event()
            twin.copied.record()


@dataclass(slots=True)
class _Twin:
    """Holds the arrays on the host."""

    memory: Tensor
    arrays: dict[str, npt.NDArray[Any]]
    copied: torch.cuda.Event | None = None

    @classmethod
    def make(cls, layout: Layout, begins: list[int], *, pinned: bool) -> "_Twin":
        memory = torch.zeros(begins[-1], dtype=torch.uint8, pin_memory=pinned)
        packed, arrays = memory.numpy(), {}
        for (name, (dtype, shape)), begin in zip(layout.items(), begins, strict=False):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays[name] = packed[begin : begin + size].view(dtype).reshape(shape)
        return cls(memory, arrays)
