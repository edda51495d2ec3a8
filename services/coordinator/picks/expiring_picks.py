"""Says which picks no engine has acknowledged in time. No I/O."""

from collections import deque
from collections.abc import Iterator


class ExpiringPicks:
    """Keeps when picks expire, in the order of their numbers, which grow by one from 1 on.

    It makes no object for a pick: at 10,000 picks a second that live for two seconds, the garbage collector would walk
    them all and hold up the answers to others for as long.
    """

    def __init__(self) -> None:
        # As many as are picked within the time that a pick is valid.
        self._times: deque[float] = deque()
        self._rows: deque[int] = deque()
        self._first = 1

    def add(self, expires_at: float, row: int) -> None:
        """Append the next pick, of the engine in ``row``. Times must not fall."""
        self._times.append(expires_at)
        self._rows.append(row)

    def expire(self, now: float) -> Iterator[tuple[int, int]]:
        """Remove the picks whose time has come; yield the number of each and the row of its engine."""
        while self._times and self._times[0] <= now:
            self._times.popleft()
            self._first += 1
            yield self._first - 1, self._rows.popleft()
