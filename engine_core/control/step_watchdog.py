"""Says whether the core computes a step, and estimates how long the step may take before it counts as hung.

The core's thread may be stuck in the step, so it cannot send anything. It writes two 64-bit cells, which its client may
share: a number that grows with each beginning and end of a step, and the limit of the present step in nanoseconds, 0
between steps.
"""

import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tokenloom.process.fall_backs import OF_PROCESS

# Sixteen bytes of shared memory cost a step 1.6 µs for both notes; a message would wait behind the step that hangs.
NUM_BYTES: Final = 16
BEAT, LIMIT = 0, 1
_CELLS = struct.Struct("qq")
SHORTEST_SECONDS = 3.0
"""A shorter step is never hung."""
NEW_SIZE_SECONDS = 10.0
"""The first step of a size may take this long, because code and memory for it may have to be prepared."""
FIRST_SECONDS = 60.0
"""The first step of all may take this long."""
# No fixed limit works: a hung core was noticed after 60 s without a step, and shorter ones would end engines whose long
# prefills or first steps take longer. The two notes of a step cost 1.6 µs.
MULTIPLE = 10.0
"""A step is hung when it takes this many times as long as steps of its size usually take."""
_WEIGHT = 1 / 8
_LARGEST_RATIO = 2.0  # a longer step moves the usual time no further, so that one outlier changes little


class StepTimes:
    """Learns the usual time of steps by their size: the number of their tokens, in powers of two."""

    def __init__(self, warm_up_seconds: float = 0.0) -> None:
        """``warm_up_seconds``: how long the warm-up took, which computed the largest step."""
        self._warm_up_seconds = warm_up_seconds
        self._usual: dict[int, float] = {}  # seconds by size; as many as a number of tokens has bits

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        size = num_tokens.bit_length()
        usual = self._usual.get(size)
        if usual is None:
            self._usual[size] = seconds
        else:
            most = _LARGEST_RATIO * usual
            self._usual[size] = usual + _WEIGHT * ((seconds if seconds < most else most) - usual)

    def limit(self, num_tokens: int) -> float:
        """Return how many seconds a step of so many tokens may take."""
        size = num_tokens.bit_length()
        if (usual := self._usual.get(size)) is not None:
            limit = MULTIPLE * usual
            return limit if limit > SHORTEST_SECONDS else SHORTEST_SECONDS  # the step of every request gets here
        if not self._usual:
            return max(FIRST_SECONDS, MULTIPLE * self._warm_up_seconds)
        return max(NEW_SIZE_SECONDS, MULTIPLE * self._most(size))

    def _most(self, size: int) -> float:
        """Return how long the first step of a size takes at most: as long as one of the next larger size that is known,
        or as the whole warm-up, or as the largest known one in proportion to the number of tokens."""
        larger = [known for known in self._usual if known > size]
        if larger:
            return self._usual[min(larger)]
        largest = max(self._usual)
        if self._warm_up_seconds:
            return max(self._warm_up_seconds, self._usual[largest])
        return self._usual[largest] * 2.0 ** (size - largest)


class StepWatchdog:
    """Notes the beginning and the end of each step. Belongs to one thread."""

    def __init__(self, cells: memoryview | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``cells``: [2] 64-bit cells to write to, those of the client if it looks. ``clock``: returns seconds."""
        self._cells = memoryview(bytearray(NUM_BYTES)).cast("q") if cells is None else cells
        self._clock = clock
        self._beats = self._cells[BEAT]
        self._times = StepTimes()
        self._in_flight: deque[int] = deque()  # tokens of each step; as many as the executor runs at once
        self._since = 0.0  # when the oldest step in flight began, or the one before it ended

    def warmed_up(self, seconds: float) -> None:
        """Note how long the warm-up took."""
        self._times = StepTimes(seconds)

    def began(self, num_tokens: int) -> None:
        """Note that a step begins."""
        in_flight = self._in_flight
        if not in_flight:
            self._since = self._clock()
        in_flight.append(num_tokens)
        self._beat()

    def ended(self) -> float:
        """Note that the oldest step has ended; return how many seconds it took beyond the step before it."""
        now = self._clock()
        seconds = now - self._since
        self._times.observe(self._in_flight.popleft(), seconds)
        self._since = now
        self._beat()
        return seconds

    def failed(self) -> None:
        """Note that no step is in flight any more."""
        self._in_flight.clear()
        self._beat()

    def _beat(self) -> None:
        in_flight, limit = self._in_flight, 0.0
        if in_flight:
            limit = self._times.limit(in_flight[0] if len(in_flight) == 1 else sum(in_flight))
        # Beat and limit are written in one go. The reader has no lock: it only asks whether the beat has moved since it
        # looked.
        self._beats += 1
        _CELLS.pack_into(self._cells, 0, self._beats, int(limit * 1e9))


class Pulse(NamedTuple):
    """Says what the core did last."""

    beat: int
    """Grows with each beginning and end of a step."""
    limit: float
    """How many seconds the steps in flight may take until the next beat; 0: no step is in flight."""


class PulseMemory:
    """The client's side: the memory, which the core inherits.

    Attributes:
        fd: The descriptor to pass to the core; None if this system has no such memory.
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        try:
            self.fd = os.memfd_create("tokenloom-pulse", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, NUM_BYTES)
            self._cells = memoryview(mmap.mmap(self.fd, NUM_BYTES)).cast("q")
        except OSError as error:
            OF_PROCESS.begin("no_shared_memory", f"for the core's pulse: {error}")
            self.close()

    def read(self) -> Pulse | None:
        """Return what the core did last; None without memory."""
        return Pulse(self._cells[BEAT], self._cells[LIMIT] / 1e9) if self.fd is not None else None

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def inherited_cells(fd: int) -> memoryview:
    """Take over the descriptor that the client passed; return its cells."""
    cells = memoryview(mmap.mmap(fd, NUM_BYTES)).cast("q")
    os.close(fd)
    return cells
