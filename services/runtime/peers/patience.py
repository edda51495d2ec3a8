"""Measures how long a peer owes something, without counting the time for which this process itself was busy."""

import time

_LONGEST_TURN_SECONDS = 1.0
"""As long as the time between two looks counts at most: what the peer sent in a longer one has not been read yet."""


class Patience:
    """Ends when the peer has owed something for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._owed_seconds = 0.0
        self._looked_at = time.monotonic()

    def is_over(self, *, owes: bool) -> bool:
        """Return whether the peer has owed something in every look for that long. To be called at least every
        half second."""
        now = time.monotonic()
        turn = min(now - self._looked_at, _LONGEST_TURN_SECONDS)
        self._looked_at = now
        self._owed_seconds = self._owed_seconds + turn if owes else 0.0
        return self._owed_seconds >= self._seconds
