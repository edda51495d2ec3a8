"""Measures silence without counting the time for which this process itself was busy."""

import asyncio
from collections.abc import Callable

LONGEST_TURN_SECONDS = 0.5
"""As long as the time between two looks of a timer counts at most: what the peer sent in a longer one has not been read
yet."""


class LivenessTimer:
    """Measures how long a peer has owed something: a sign of life, credit, the end of a step.

    Attributes:
        owed: Seconds, as of the last look. The reader of what was owed sets it to zero.
    """

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        """``read`` returns seconds since no particular moment; None for the time of the running event loop."""
        # A process that was itself starved for 10 s has not read what its peers sent meanwhile. Counting that time as
        # their silence once ended every stream of a busy gateway; so a pause counts as one short turn.
        self._read = read or asyncio.get_running_loop().time
        self._looked_at = self._read()
        self.owed = 0.0

    def look(self, *, owes: bool) -> float:
        """Return :attr:`owed`, which grows if the peer owes something now, and is zero otherwise. To be called at least
        every :data:`LONGEST_TURN_SECONDS`."""
        now = self._read()
        self.owed = self.owed + min(now - self._looked_at, LONGEST_TURN_SECONDS) if owes else 0.0
        self._looked_at = now
        return self.owed
