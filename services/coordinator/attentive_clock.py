"""A clock that does not count the time for which this process itself was busy."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

TICK_SECONDS = 0.1
LONGEST_SECONDS = 0.25
"""As long as a turn of the event loop counts at most: the reports that arrived during a longer one have not been read
yet, and their engines are not silent. A report is read within a few turns; so many of them count for less than the
time after which an engine is late."""


class AttentiveClock:
    """Returns seconds that grow with those of ``read``, except while :meth:`run` gets no turn of the event loop."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._base = self._ticked_at = read()

    def __call__(self) -> float:
        """Return the time, in seconds since no particular moment."""
        # A batch of 150 picks once kept the loop from reading reports for so long that every engine counted as dead.
        return self._base + min(self._read() - self._ticked_at, LONGEST_SECONDS)

    def tick(self) -> None:
        """Count from now on. To be called at least every :data:`LONGEST_SECONDS`."""
        self._base, self._ticked_at = self(), self._read()

    async def run(self) -> NoReturn:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()
