"""Allocates packed weights in huge pages, in which a processor reads memory faster than in pages of 4 KiB, and moves
weights of a GPU to memory of the host, from which it reads them over its bus.

A step reads every weight once, so pages of 4 KiB cost it a translation for each page, and a pause of the processor's
prefetching. Weights share large slabs, because a single matrix may be smaller than a huge page.
"""

import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..device.device_link import memory_on_bus

# One thread of an AVX2 processor reads 32.7 GB/s from huge pages and 23.7 from pages of 4 KiB.
_SLAB = 64 << 20
"""Bytes; only what is written takes memory."""
_LEAST = 128 << 10
"""Smaller tensors are allocated as usual, in bytes: a tiny model gains nothing."""
_LINE = 64
_PAGE = 2 << 20
"""Bytes of a huge page."""


class WeightMemory:
    """Makes tensors, one after the other in a slab. It keeps no memory: a huge page is returned with the last tensor
    that lies in it, and a slab's addresses with its last tensor.

    Any thread may call it.
    """

    def __init__(self, slab: int = _SLAB) -> None:
        self._slab = slab
        self._current: weakref.ref[_Slab] | None = None
        # Reentrant: the garbage collector may free a tensor, and return its pages, while this thread makes another one.
        self._lock = threading.RLock()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of ``shape`` and ``dtype`` on the CPU."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes < _LEAST:
            return torch.empty(shape, dtype=dtype)
        # Two engines that two threads loaded at the same time got one place for two matrices, and answered wrongly.
        with self._lock:
            slab = self._current() if self._current is not None else None
            if slab is None or slab.used + nbytes > len(slab.buffer):
                slab = _Slab(max(nbytes, self._slab))
                self._current = weakref.ref(slab)
            # The tensor keeps the view, and nothing else does: the view ends with the last tensor of this memory.
            begin, view = slab.take(nbytes)
            tensor = torch.frombuffer(view, dtype=torch.uint8)
            weakref.finalize(view, self._give_back, slab, begin, nbytes).atexit = False
        return tensor.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of ``tensor``; of one without data (``meta``), as a check of a checkpoint has them,
        another one without data."""
        if tensor.is_meta:
            return tensor.contiguous()
        return self.empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def _give_back(self, slab: "_Slab", begin: int, nbytes: int) -> None:
        with self._lock:
            slab.give_back(begin, nbytes)


class _Slab:
    """Holds memory for tensors, and records which huge pages hold one."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = _huge_pages(nbytes)
        self.used = 0
        self._tensors: list[set[int]] = [set() for _ in range(-(-nbytes // _PAGE))]
        """Of each huge page the tensors that lie in it, by where they begin."""

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """Return where the memory of the next tensor begins, and a view of that memory."""
        begin = self.used
        for number in self._pages(begin, nbytes):
            self._tensors[number].add(begin)
        self.used += -(-nbytes // _LINE) * _LINE
        return begin, memoryview(self.buffer)[begin : begin + nbytes]

    def give_back(self, begin: int, nbytes: int) -> None:
        """Return the pages in which only this tensor was."""
        for number in self._pages(begin, nbytes):
            tensors = self._tensors[number]
            tensors.discard(begin)
            if not tensors:
                # Without it a model that sleeps kept what shared a slab with another one of the process: 42 of 73 MiB.
                size = min(_PAGE, len(self.buffer) - number * _PAGE)
                self.buffer.madvise(mmap.MADV_DONTNEED, number * _PAGE, size)

    def _pages(self, begin: int, nbytes: int) -> range:
        return range(begin // _PAGE, -(-(begin + nbytes) // _PAGE))


def _huge_pages(nbytes: int) -> mmap.mmap:
    """Return zeroed memory, in huge pages if the kernel has them."""
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


weight_memory = WeightMemory()
"""The memory of this process's packed weights."""


_PACKAGE = __name__.split(".gpu_worker.", maxsplit=1)[0] + ".gpu_worker."
_HOST_MEMORY = "_host_memory"
"""The attribute of a tensor that keeps the memory of the host in which its content lies."""
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8)
"""The dtypes of weights; what layers count has others."""


def keep_on_host(layer: object, room: int) -> int:
    """Move matrices of a layer to memory of the host, of which they take ``room`` bytes at most, and let the GPU read
    them there. Returns how many bytes they take."""
    taken = 0
    for tensor in tensors_of(layer):
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.dim() < 2 or tensor.dtype not in _WEIGHTS or not is_whole or taken + tensor.nbytes > room:
            continue
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        setattr(tensor, _HOST_MEMORY, memory)
        tensor.data = memory_on_bus(memory, tensor.device).view(tensor.dtype).view(tensor.shape)
        taken += tensor.nbytes
    return taken


def is_on_host(tensor: Tensor) -> bool:
    """Return whether :func:`keep_on_host` moved this tensor."""
    return hasattr(tensor, _HOST_MEMORY)


def tensors_of(model: object) -> list[Tensor]:
    """Return every tensor that the parts of a model, or of a layer, hold, each once, but none that oneDNN packed: it is
    on the host."""
    found = _walk(vars(model), {id(model)})  # which a plugin's own class may be
    return list({id(tensor): tensor for tensor in found if not tensor.is_mkldnn and not tensor.is_meta}.values())


def _walk(part: object, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
        return
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, (list, tuple)):
        children: list[object] = list(part)
    elif isinstance(part, dict):
        children = list(part.values())
    elif isinstance(part, nn.Module) or (type(part).__module__.startswith(_PACKAGE) and hasattr(part, "__dict__")):
        children = list(vars(part).values())
    else:
        children = []
    for child in children:
        yield from _walk(child, seen)
