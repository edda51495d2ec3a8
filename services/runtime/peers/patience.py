"""Measures how long a peer owes something, without counting the time for which this process itself was busy."""

from collections.abc import Callable

_LONGEST_TURN_SECONDS = 1.0
"""As long as the time between two looks counts at most: what the peer sent in a longer one has not been read yet."""


class Patience:
    """Ends when the peer has owed something for ``seconds``."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds since no particular moment."""
        self._seconds = seconds
        self._clock = clock
        self._owed_seconds = 0.0
        self._looked_at = clock()

    def is_over(self, *, owes: bool) -> bool:
        """Return whether the peer has owed something in every look for that long. To be called at least every
        half second."""
        now = self._clock()
        # A process that was itself starved for 10 s has not read what its peers sent meanwhile. Counting that time as
        # their silence once ended every stream of a busy gateway.
        turn = min(now - self._looked_at, _LONGEST_TURN_SECONDS)
        self._looked_at = now
        self._owed_seconds = self._owed_seconds + turn if owes else 0.0
        return self._owed_seconds >= self._seconds
