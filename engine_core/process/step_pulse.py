"""Shows a client, through shared memory, whether its core computes a step and how long the step may take.

The core's thread may be stuck in the step, so it cannot send anything. The memory holds two 64-bit cells: a number that
grows with each beginning and end of a step, and the limit of the present step in nanoseconds, 0 between steps.
"""

import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tokenloom.process.fall_backs import OF_PROCESS

from ..scheduling.step_times import StepTimes

# Sixteen bytes of shared memory cost a step 1.6 µs for both notes; a message would wait behind the step that hangs.
_NUM_BYTES = 16
_BEAT, _LIMIT = 0, 1
_CELLS = struct.Struct("qq")


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
            os.ftruncate(self.fd, _NUM_BYTES)
            self._cells = memoryview(mmap.mmap(self.fd, _NUM_BYTES)).cast("q")
        except OSError as error:
            OF_PROCESS.begin("no_shared_memory", f"for the core's pulse: {error}")
            self.close()

    def read(self) -> Pulse | None:
        """Return what the core did last; None without memory."""
        return Pulse(self._cells[_BEAT], self._cells[_LIMIT] / 1e9) if self.fd is not None else None

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def inherited_cells(fd: int) -> memoryview:
    """Take over the descriptor that the client passed; return its cells."""
    cells = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("q")
    os.close(fd)
    return cells


class StepPulse:
    """The core's side: notes the beginning and the end of each step. Belongs to one thread."""

    def __init__(self, cells: memoryview | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``cells``: of :func:`inherited_cells`; None: no client looks. ``clock``: returns seconds."""
        self._cells = memoryview(bytearray(_NUM_BYTES)).cast("q") if cells is None else cells
        self._clock = clock
        self._beats = self._cells[_BEAT]
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
