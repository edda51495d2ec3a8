"""The memory through which a client sees whether its core computes a step and how long the step may take."""

import mmap
import os
from typing import NamedTuple

from tokenloom.process.fall_backs import OF_PROCESS

from ..control.step_watchdog import BEAT, LIMIT, NUM_BYTES


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
