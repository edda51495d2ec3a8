"""Allocates the memory of a KV pool: either shared with other processes, or in huge pages.

The two exclude each other on common kernels: a memfd gets no transparent huge pages, anonymous memory gets them, and
decode attention is faster with them. So only a pool that other engines read, or that belongs to a worker in a process
of its own, is shared.
"""

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolMemory:
    """Holds the zeroed, writable memory of one pool. The bytes live until the last view of ``buffer`` is gone."""

    def __init__(self, buffer: mmap.mmap, fd: int | None, *, is_shared: bool) -> None:
        """Take ownership of ``buffer`` and ``fd``, which the class methods make."""
        self._buffer = buffer
        self._fd = fd
        self._is_shared = is_shared
        # An open descriptor keeps the bytes alive, so it is closed with this object at the latest.
        self._close = weakref.finalize(self, os.close, fd) if fd is not None else None

    @classmethod
    def allocate(cls, nbytes: int, shared: bool) -> "PoolMemory":
        """Allocate ``nbytes``, rounded up to whole pages.

        ``shared`` makes a sealed memfd that peers can map read-only; otherwise the memory is anonymous, and in huge
        pages if the kernel supports them.
        """
        nbytes = whole_pages(nbytes)
        if shared:
            fd = create_memfd()
            try:
                return cls.of_memfd(fd, nbytes)
            finally:
                os.close(fd)  # the mapping stays
        buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            # Decode attention walks the pool block by block; with pages of 4 KiB it waits for the translation of
            # addresses as well.
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return cls(buffer, None, is_shared=False)

    @classmethod
    def of_memfd(cls, fd: int, nbytes: int) -> "PoolMemory":
        """Give a new memfd ``nbytes``, a number of whole pages, for good, and map it. The caller keeps ``fd``."""
        os.ftruncate(fd, nbytes)
        buffer = mmap.mmap(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # the file cannot shrink, so a reader never gets a bus error
        # Readers get a descriptor that cannot write; a seal against writing would also prevent ``discard``.
        return cls(buffer, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), is_shared=True)

    @classmethod
    def of_part(cls, fd: int, offset: int, nbytes: int) -> "PoolMemory":
        """Map a part of another process's memory, which :meth:`of_memfd` made from the same memfd. The caller keeps
        ``fd``; readers get their descriptor from the other process. ``offset`` and ``nbytes``: whole pages."""
        return cls(mmap.mmap(fd, nbytes, offset=offset), None, is_shared=True)

    @property
    def nbytes(self) -> int:
        """The size of the whole memory, in bytes."""
        return len(self._buffer)

    @property
    def buffer(self) -> memoryview:
        """The memory as [nbytes] writable bytes. Views of it keep the memory alive."""
        return memoryview(self._buffer)

    @property
    def fd(self) -> int | None:
        """The descriptor of the sealed memfd, to pass to readers; None if the memory is not shared, or closed."""
        return self._fd if self._close is not None and self._close.alive else None

    def discard(self) -> None:
        """Release the pages to the system: all bytes are zero, in every mapping, until they are written again."""
        # MADV_DONTNEED on a memfd only drops this mapping's page tables: the pages stay in the file and count as used
        # memory. MADV_REMOVE punches a hole, which a seal against writing would forbid.
        self._buffer.madvise(mmap.MADV_REMOVE if self._is_shared else mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor, so that no new reader can map the memory; the owner's views stay valid. Idempotent."""
        if self._close is not None:
            self._close()


class PoolPart(PoolMemory):
    """Shows the bytes of a pool from an offset on: the caches of a second model lie behind those of the first."""

    def __init__(self, whole: PoolMemory, offset: int) -> None:
        super().__init__(whole._buffer, None, is_shared=whole._is_shared)
        self._offset = offset

    @property
    def nbytes(self) -> int:
        return len(self._buffer) - self._offset

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._buffer)[self._offset :]


def whole_pages(nbytes: int) -> int:
    """Return the size of the pages that hold ``nbytes``, at least one."""
    return max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)


def create_memfd() -> int:
    """Create an empty memfd for :meth:`PoolMemory.of_memfd`. Raises ``OSError`` if the system has none."""
    return os.memfd_create("tokenloom-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.integer[Any]]

Wait = Callable[[], None]
"""Waits until a copy that was begun has ended. Raises :class:`..kv_transfer.kv_transport.KVTransferError` if the device
failed."""


class PeerMemory(Protocol):
    """Holds the pool of another process, mapped into this process's device."""

    def copy(self, source_ids: BlockIds, target_ids: BlockIds) -> None:
        """Copy blocks of the other pool over blocks of this one, in all regions, with one launch; wait for its end.

        Raises :class:`..kv_transfer.kv_transport.KVTransferError` (``transport``) if the device failed.
        """

    def close(self) -> None:
        """Release the mapping. No copy may run. Idempotent."""


class DeviceMemory(Protocol):
    """Holds a pool on a device. Its methods may be called by any thread.

    ``packed`` is memory of the host for blocks of some regions: [regions, n, block_bytes] bytes, contiguous.
    """

    @property
    def nbytes(self) -> int:
        """The size of the pool, in bytes."""

    def start_read(self, block_ids: BlockIds, regions: slice, packed: Bytes) -> Wait:
        """Begin to copy blocks [n] to the host, as they are after all steps that the device was given so far."""

    def start_write(self, block_ids: BlockIds, regions: slice, packed: Bytes) -> Wait:
        """Begin to copy blocks [n] from the host, after all steps that the device was given so far. ``packed`` must not
        change before the end."""

    def staging(self, nbytes: int) -> Bytes:
        """Return pinned memory of the host, [nbytes]: the device copies from and to it without the processor."""

    def pin(self, memory: Bytes) -> None:
        """Do the same for memory that exists, such as one that processes share, if the driver allows it."""

    def unpin(self, memory: Bytes) -> None:
        """End :meth:`pin`, before the memory is released."""

    def settle(self) -> None:
        """Wait for all steps that the device was given so far, because other processes read what they wrote."""

    def export(self) -> bytes:
        """Return a handle with which another process of this host maps the pool.

        Raises :class:`..kv_transfer.kv_transport.KVTransferError` (``transport``) if this memory cannot be shared.
        """

    def map_peer(self, handle: bytes, num_blocks: int) -> PeerMemory:
        """Map the pool of another process, of so many blocks as large as this pool's, from what it exported.

        Raises :class:`..kv_transfer.kv_transport.KVTransferError` (``transport``) if the device cannot reach it.
        """
