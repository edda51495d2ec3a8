"""Places the intermediate results of a step in little memory: those that live at different times share it."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import Entry

_ALIGNMENT = 64


@dataclass(slots=True)
class Buffer:
    """Holds where an intermediate result was while the step was recorded, and when it is used."""

    start: int
    nbytes: int
    first: int = -1
    """The first call that uses it; -1: none does."""
    last: int = -1
    offset: int = 0
    """Its place in the memory of all recordings."""


class Buffers:
    """Holds the buffers of one recording in the order of their addresses."""

    def __init__(self, tensors: Mapping[int, Tensor], calls: Sequence[Entry], results: Sequence[Tensor]) -> None:
        """``tensors``: those that the step allocated, by address. ``results`` live until the step's end."""
        self._buffers = [
            Buffer(start, tensor.untyped_storage().nbytes())
            for start, tensor in sorted(tensors.items())
            if tensor.untyped_storage().nbytes()
        ]
        self._starts = [buffer.start for buffer in self._buffers]
        for number, call in enumerate(calls):
            for address in call.addresses():
                if (buffer := self._find(address)) is not None:
                    buffer.first = number if buffer.first < 0 else buffer.first
                    buffer.last = number
        # Results live past the last call: they are read until the next step begins.
        for result in results:
            if (buffer := self._find(result.data_ptr())) is not None:
                buffer.first, buffer.last = max(buffer.first, 0), len(calls)
        self.nbytes = _place([buffer for buffer in self._buffers if buffer.first >= 0])
        """The size of the memory that the recording needs."""

    def moved(self, address: int, base: int) -> int:
        """Return where what was at ``address`` lies in the memory that begins at ``base``; elsewhere, the same."""
        buffer = self._find(address)
        return address if buffer is None else base + buffer.offset + address - buffer.start

    def view(self, tensor: Tensor, memory: Tensor) -> Tensor:
        """Return the place of a contiguous ``tensor`` of the recorded step in ``memory``."""
        offset = self.moved(tensor.data_ptr(), 0)
        return memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an intermediate result, without gaps."""
        return tensor.is_contiguous() and self._find(tensor.data_ptr()) is not None

    def _find(self, address: int) -> Buffer | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._buffers[place].nbytes:
            return None
        return self._buffers[place]


def _place(buffers: list[Buffer]) -> int:
    """Choose the offsets: each at the lowest place that no other one has at the same time. Returns the size of all."""
    placed: list[Buffer] = []
    size = 0
    # A decoder's step needs few results at a time, so its memory stays in a cache where one buffer for each call would
    # not.
    for buffer in sorted(buffers, key=lambda each: each.first):
        placed = [other for other in placed if other.last >= buffer.first]
        buffer.offset = 0
        for other in sorted(placed, key=lambda each: each.offset):
            if buffer.offset + buffer.nbytes <= other.offset:
                break
            buffer.offset = max(buffer.offset, _aligned(other.offset + other.nbytes))
        placed.append(buffer)
        size = max(size, buffer.offset + buffer.nbytes)
    return _aligned(size)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class SharedMemory:
    """Holds the memory in which every recording of a model computes, one at a time."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> bool:
        """Make room for a recording. Returns whether the memory moved, so that earlier recordings are of no use."""
        if nbytes <= len(self.bytes):
            return False
        self.bytes = torch.empty(max(nbytes, 2 * len(self.bytes)), dtype=torch.uint8)
        return True
