"""The memory of a KV pool, made before the pool so that its kind can be chosen: shared with readers, or in huge pages.

The two exclude each other on common kernels: a memfd gets no transparent huge pages, anonymous memory gets them, and
decode attention is faster with them. So only a pool that others read is shared.
"""

import contextlib
import fcntl
import mmap
import os
import weakref

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolMemory:
    """Zeroed, writable memory of one pool. The bytes live until the last view of ``buffer`` is gone."""

    def __init__(self, buffer: mmap.mmap, fd: int | None) -> None:
        """Takes over both; :meth:`allocate` makes them."""
        self._buffer = buffer
        self._fd = fd
        self._is_shared = fd is not None
        # An open descriptor keeps the bytes, so it goes with this object at the latest.
        self._close = weakref.finalize(self, os.close, fd) if fd is not None else None

    @classmethod
    def allocate(cls, nbytes: int, shared: bool) -> "PoolMemory":
        """Args:
        nbytes: Rounded up to whole pages.
        shared: A sealed memfd that peers can map, read-only; else anonymous memory in huge pages where there are any.
        """
        nbytes = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        if shared:
            return cls._shared(nbytes)
        buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return cls(buffer, None)

    @classmethod
    def _shared(cls, nbytes: int) -> "PoolMemory":
        fd = os.memfd_create("tokenloom-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            buffer = mmap.mmap(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a reader's mapping can never end in a bus error
            # Readers get a descriptor that cannot write. A seal against writing would also forbid ``discard``.
            return cls(buffer, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(fd)  # the mapping stays

    @property
    def nbytes(self) -> int:
        """Of the whole memory."""
        return len(self._buffer)

    @property
    def buffer(self) -> memoryview:
        """[nbytes] bytes, writable. Views of it keep the memory alive."""
        return memoryview(self._buffer)

    @property
    def fd(self) -> int | None:
        """Of the sealed memfd, to pass to readers; None when it is not shared, or closed."""
        return self._fd if self._close is not None and self._close.alive else None

    def discard(self) -> None:
        """Gives the pages back to the system: all bytes are zero, for every mapping, until they are written again."""
        self._buffer.madvise(mmap.MADV_REMOVE if self._is_shared else mmap.MADV_DONTNEED)

    def close(self) -> None:
        """No reader can be let in any more; the owner's views go on working. Idempotent."""
        if self._close is not None:
            self._close()
