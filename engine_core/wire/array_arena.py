"""Shared memory in which a process lends arrays to others on its host. They read the arrays in place and give them back
in any order.

The memory is a sealed memfd that the readers inherit: it has no name, and is freed with the last process that maps it.

    generations  [1 + num_readers, NUM_SLOTS] uint64; row 0 is the sender's, row 1 + r that of reader r
    data         regions, each aligned to a cache line

A region belongs to a slot. The sender writes the region's generation into its row when it lends the region; a reader
writes the same number into its own row when nothing refers to the region any more. A slot whose rows agree is free,
with its region. Each cell therefore has one writer, and a process that dies leaves nothing to clean up.
"""

import bisect
import fcntl
import functools
import mmap
import os
import threading
import weakref
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.request.limits import Reservation


class FreeSpace:
    """Allocates by first fit, which reuses low addresses and so touches few pages."""

    def __init__(self, size: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # [start, end), sorted, none touches another

    @property
    def nbytes(self) -> int:
        """Free bytes in total, possibly in several pieces."""
        return sum(end - start for start, end in self._holes)

    def take(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` (more than 0) in one piece and return its start; None if no piece is large enough."""
        # At most 256 regions are lent, so a search of the holes is cheaper than a structure that sorts them by size.
        for index, (start, end) in enumerate(self._holes):
            if end - start >= nbytes:
                self._holes[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a piece that :meth:`take` returned."""
        end = start + nbytes
        after = bisect.bisect(self._holes, (start, end))
        first, last = after, after
        if after > 0 and self._holes[after - 1][1] == start:
            first -= 1
            start = self._holes[first][0]
        if after < len(self._holes) and self._holes[after][0] == end:
            end = self._holes[after][1]
            last += 1
        self._holes[first:last] = [(start, end)]


# 8 MiB of embeddings take the front's event loop 0.8 ms this way. A file in /dev/shm for each array would need no
# protocol, but its pages are new each time, which is slower than a frame.
MIN_BYTES = 64 << 10
"""Minimum size of a lent array: a smaller one costs no more in a frame."""
NUM_SLOTS = 256
"""Limit of regions lent at once: 16 MiB of arrays of the minimum size."""
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region(NamedTuple):
    """Names the bytes of an array in a message."""

    slot: int
    generation: int
    offset: int
    """Relative to the start of the data."""
    nbytes: int


class ArenaAddress(msgspec.Struct, frozen=True):
    """Describes the memory to a reader, which inherits the descriptor."""

    fd: int
    nbytes: int
    """Size of the data."""
    num_readers: int

    @property
    def header_bytes(self) -> int:
        """The size of the header in whole pages, because the data is mapped separately."""
        return _round_up((1 + self.num_readers) * NUM_SLOTS * 8, mmap.ALLOCATIONGRANULARITY)


class ArrayArena:
    """The sender's side; belongs to one thread. Without an arena, or without room in it, arrays are sent in frames."""

    def __init__(self, nbytes: int, num_readers: int = 1, min_bytes: int = MIN_BYTES) -> None:
        """
        Args:
            nbytes: Limit of bytes lent at once; 0 for no arena. Pages take memory only once they are used.
            num_readers: How many processes read.
            min_bytes: Minimum size of an array that is lent.
        """
        self._min_bytes = max(min_bytes, 1)
        self.address: ArenaAddress | None = None
        self._space = FreeSpace(0)
        # Not a ring: a request's embeddings are read in place as long as the request lives, so the oldest array would
        # block all later ones.
        self._free_slots = list(range(NUM_SLOTS - 1, -1, -1))
        self._lent: dict[int, Reservation] = {}  # by slot: held for the readers until all have given it back
        self._num_taken = 0
        if nbytes:
            try:
                self._allocate(_round_up(nbytes, _ALIGNMENT), num_readers)
            except OSError as error:  # memfd is not available or not allowed
                OF_PROCESS.begin("no_shared_memory", f"arrays: they are sent over sockets: {error}")

    def lend(self) -> "Loan":
        """Return a loan for the arrays of one message."""
        return Loan(self)

    def take(self, array: npt.NDArray[Any]) -> tuple[Region, Reservation] | None:
        """Copy an array into a region, which is freed when the reservation is released. Returns None if the array is
        too small or no room is left."""
        if self.address is None or array.nbytes < self._min_bytes:
            return None
        self._reclaim()
        if not self._free_slots or (offset := self._space.take(_round_up(array.nbytes, _ALIGNMENT))) is None:
            return None
        slot = self._free_slots.pop()
        region = Region(slot, int(self._cells[0, slot]) + 1, offset, array.nbytes)
        # The bytes before the generation: a reader that sees the number may read at once.
        self._data[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self._cells[0, slot] = region.generation
        self._num_taken += 1
        return region, Reservation(functools.partial(self._free, region), 1)

    def give_to_readers(self, slot: int, reservation: Reservation) -> None:
        """Take over a region whose message the readers may have: it is freed when all of them have given it back."""
        self._lent[slot] = reservation.move()

    @property
    def num_lent(self) -> int:
        """The number of regions in use: of messages not sent yet, and those that readers have not given back."""
        self._reclaim()
        return self._num_taken

    def close(self) -> None:
        """Stop lending; readers keep what they have. Idempotent."""
        if self.address is not None:
            os.close(self.address.fd)
            self.address = None

    def _allocate(self, nbytes: int, num_readers: int) -> None:
        fd = os.memfd_create("tokenloom-arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        address = ArenaAddress(fd, nbytes, num_readers)
        try:
            os.ftruncate(fd, address.header_bytes + nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # the size is fixed: no access can end in a bus error
            memory = mmap.mmap(fd, address.header_bytes + nbytes)
        except OSError:
            os.close(fd)
            raise
        self.address = address
        self._cells = _cells_of(memory, num_readers)
        self._data = np.frombuffer(memory, np.uint8, offset=address.header_bytes)
        self._space = FreeSpace(nbytes)

    def _reclaim(self) -> None:
        if self._lent:
            # Each cell has one writer, so no lock crosses processes, and one that dies holds none.
            are_free = (self._cells[1:] == self._cells[0]).all(axis=0)
            for slot in [slot for slot in self._lent if are_free[slot]]:
                self._lent.pop(slot).release()

    def _free(self, region: Region, _: int) -> None:
        self._num_taken -= 1
        self._free_slots.append(region.slot)
        self._space.give_back(region.offset, _round_up(region.nbytes, _ALIGNMENT))


class Loan:
    """Holds the regions of one message until the readers may have it, or frees them.

    A message of which one byte was sent will be completed, even if its sender was cancelled, so its regions belong to
    the readers from then on. Leaving the context without an error means the same; with an error, what is still held is
    freed.
    """

    def __init__(self, arena: ArrayArena) -> None:
        self._arena = arena
        self._held: list[tuple[int, Reservation]] = []  # by slot

    def put(self, array: npt.NDArray[Any]) -> Region | None:
        """Copy an array into a region of this loan. Returns None as :meth:`ArrayArena.take`."""
        if (taken := self._arena.take(array)) is None:
            return None
        region, reservation = taken
        self._held.append((region.slot, reservation))
        return region

    def hand_over(self) -> None:
        """Leave the regions to the readers, because the message has begun to be sent. Idempotent."""
        for slot, reservation in self._held:
            self._arena.give_to_readers(slot, reservation)
        self._held = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.hand_over()
        for _slot, reservation in self._held:
            reservation.release()
        self._held = []


class ArenaReader:
    """Opens regions in one thread; the thread that drops the last reference returns a region."""

    def __init__(self, address: ArenaAddress, index: int = 0) -> None:
        """Take over the descriptor of reader number ``index``. Raises ``ValueError`` for a foreign descriptor."""
        if not 0 <= index < address.num_readers or not _is_arena(address):
            raise ValueError(f"reader {index}: descriptor {address.fd} does not belong to {address}")
        header = mmap.mmap(address.fd, address.header_bytes)
        self._data = mmap.mmap(address.fd, address.nbytes, prot=mmap.PROT_READ, offset=address.header_bytes)
        os.close(address.fd)  # the mappings remain
        self._cells = _cells_of(header, address.num_readers)
        self._given_back = self._cells[1 + index]
        self._opened = [0] * NUM_SLOTS  # generations
        self._views: dict[
            int, weakref.ref[npt.NDArray[np.uint8]]
        ] = {}  # by slot; the callback of the reference gives back
        self._fence = threading.RLock()

    def open(self, region: Region) -> memoryview:
        """Return the bytes of a region, read-only. They are given back when the view, and every array over it, is gone.

        Raises ``ValueError`` for a region that is not lent or was opened before.
        """
        slot, generation, offset, nbytes = region
        # A region that is opened twice would be given back twice, and the second time it would be another message's.
        if not (0 <= slot < NUM_SLOTS and self._opened[slot] < generation == int(self._cells[0, slot])):
            raise ValueError(f"{region} is not lent, or was opened before")
        if not (0 <= offset < offset + nbytes <= len(self._data)):
            raise ValueError(f"{region} is not within {len(self._data)} bytes")
        self._opened[slot] = generation
        view = np.frombuffer(self._data, np.uint8, nbytes, offset)
        self._views[slot] = weakref.ref(view, functools.partial(self._give_back, slot, generation))
        return view.data

    def _give_back(self, slot: int, generation: int, _: object) -> None:
        with self._fence:  # a memory barrier: otherwise the write could be visible before the last read has happened
            self._given_back[slot] = generation


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _cells_of(memory: mmap.mmap, num_readers: int) -> npt.NDArray[np.uint64]:
    num_rows = 1 + num_readers
    return np.frombuffer(memory, np.uint64, num_rows * NUM_SLOTS).reshape(num_rows, NUM_SLOTS)


def _is_arena(address: ArenaAddress) -> bool:
    try:
        size, seals = os.fstat(address.fd).st_size, fcntl.fcntl(address.fd, fcntl.F_GET_SEALS)
        return size == address.header_bytes + address.nbytes and seals & _SEALS == _SEALS
    except OSError:  # not a memfd, or not open
        return False
