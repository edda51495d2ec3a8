"""Measures silence without counting the time for which this process itself was busy."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

LONGEST_TURN_SECONDS = 0.5
"""As long as the time between two looks of a timer counts at most: what the peer sent in a longer one has not been read
yet."""
TICK_SECONDS = 0.1
LONGEST_TICK_SECONDS = 0.25
"""As long as a turn of the event loop counts at most for a clock that runs: the reports that arrived during a longer
one have not been read yet, and their engines are not silent. A report is read within a few turns; so many of them count
for less than the time after which an engine is late."""


class StallAwareClock:
    """Returns seconds that grow with those of ``read``, by at most ``longest`` between two ticks."""

    def __init__(self, read: Callable[[], float], longest: float = LONGEST_TICK_SECONDS) -> None:
        """``longest``: seconds."""
        self._read = read
        self._longest = longest
        self._base = self._ticked_at = read()

    def __call__(self) -> float:
        """Return the time, in seconds since no particular moment."""
        # A batch of 150 picks once kept the loop from reading reports for so long that every engine counted as dead.
        return self._base + min(self._read() - self._ticked_at, self._longest)

    def tick(self) -> float:
        """Count from now on, and return the time. To be called at least every ``longest`` seconds."""
        self._base, self._ticked_at = self(), self._read()
        return self._base

    async def run(self) -> NoReturn:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()


class LivenessTimer:
    """Measures how long a peer has owed something: a sign of life, credit, the end of a step.

    Attributes:
        owed: Seconds, as of the last look. The reader of what was owed sets it to zero.
    """

    def __init__(self, read: Callable[[], float] | None = None, longest: float = LONGEST_TURN_SECONDS) -> None:
        """``read`` returns seconds since no particular moment; None for the time of the running event loop.
        ``longest``: seconds between two looks that count at most."""
        # A process that was itself starved for 10 s has not read what its peers sent meanwhile. Counting that time as
        # their silence once ended every stream of a busy gateway; so a pause counts as one short turn.
        self._read = read or asyncio.get_running_loop().time
        self._longest = longest
        self._looked_at = self._read()
        self.owed = 0.0

    def look(self, *, owes: bool) -> float:
        """Return :attr:`owed`, which grows if the peer owes something now, and is zero otherwise. To be called at least
        every :data:`LONGEST_TURN_SECONDS`."""
        now = self._read()
        self.owed = self.owed + min(now - self._looked_at, self._longest) if owes else 0.0
        self._looked_at = now
        return self.owed
