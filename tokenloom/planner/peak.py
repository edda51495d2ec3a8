"""Remembers the largest of the latest values. No I/O."""

from collections import deque


class Peak:
    """Keeps the maximum of a sliding window of time, as the stabilization of Kubernetes' autoscaler does."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: length of the window."""
        self._seconds = seconds
        self._since: float | None = None
        self._values: deque[tuple[float, float]] = deque()  # falling, so that the first is the maximum

    def add(self, now: float, value: float) -> None:
        """Take the value at ``now``, in seconds of a monotonic clock."""
        self._since = now if self._since is None else self._since
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - self._seconds:
            self._values.popleft()

    def get(self, now: float) -> float:
        """Return the maximum; infinity while less than a whole window was observed."""
        if self._since is None or now - self._since < self._seconds:
            return float("inf")
        return self._values[0][1]
