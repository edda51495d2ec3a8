"""Hands pixels from the processes that prepare them to the tower, in memory that both have.

An image of a megapixel has up to 40 MB of pixels. They are written once and read once; the service itself only learns
where they lie.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Pixels = dict[str, npt.NDArray[Any]]
MAX_SLOT_BYTES = 1 << 30
"""Of one image's pixels: far more than any processor makes of the largest image."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""The environment of processes that prepare: the threads of numpy's products waited for each other, and a product for
the loudness of a sound took nine times the processor time."""
_DTYPES = frozenset({"float32", "float16", "int64", "int32", "uint8", "bool"})


class PixelPart(msgspec.Struct, frozen=True):
    """Says where one array lies. ``offset``: its first byte in the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def new_memory() -> int:
    """Return the descriptor of a file in memory; of one without a name on disk where the system has none there."""
    try:
        return os.memfd_create("tokenloom-encoder")
    except OSError:  # forbidden by a container's seccomp profile, for example
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def write_pixels(slot: int, pixels: Pixels) -> list[PixelPart]:
    """Write arrays to a slot. ``slot``: its descriptor."""
    parts, offset = [], 0
    os.ftruncate(slot, 0)
    for name, values in pixels.items():
        parts.append(PixelPart(name, str(values.dtype), values.shape, offset))
        offset = write_all(slot, memoryview(values.data).cast("B") if values.size else b"", offset)
    return parts


def read_pixels(slot: int, parts: Sequence[PixelPart]) -> Pixels:
    """Return a copy of the arrays of a slot. Raises ``ValueError`` if they do not lie there."""
    # A copy, and no map: the process that wrote them reads files of strangers, and could cut a map's memory.
    pixels: Pixels = {}
    for part in parts:
        if part.dtype not in _DTYPES or min((part.offset, *part.shape)) < 0:
            raise ValueError(f"{part.name} has numbers of another kind")
        size = math.prod(part.shape) * np.dtype(part.dtype).itemsize
        if size > MAX_SLOT_BYTES:
            raise ValueError(f"{part.name} is too large")
        data = read_all(slot, size, part.offset)
        pixels[part.name] = np.frombuffer(data, part.dtype).reshape(part.shape)
    return pixels


def write_all(descriptor: int, data: "memoryview | bytes", offset: int) -> int:
    """Write all bytes at an offset. Returns the offset behind them."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
    return offset


def read_all(descriptor: int, size: int, offset: int) -> bytearray:
    """Return so many bytes. Raises ``ValueError`` if there are fewer."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        done = os.preadv(descriptor, [view], offset)
        if not done:
            raise ValueError("the slot holds fewer bytes")
        view, offset = view[done:], offset + done
    return data


class PixelSlots:
    """Owns the slots. One is taken from the time when an image is prepared until its rows are computed."""

    def __init__(self, count: int) -> None:
        self.descriptors = [new_memory() for _ in range(count)]
        self._free = list(self.descriptors)

    def take(self) -> int:
        """Take a slot. The callers take turns, so that there is always one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Give a slot back, and its memory."""
        os.ftruncate(slot, 0)
        self._free.append(slot)

    def close(self) -> None:
        """Give the memory back. Call it when the processes that have the slots have ended."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
