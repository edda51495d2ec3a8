"""Learns how the duration of a step grows with the batch. No I/O."""

from typing import Final

_KEPT: Final = 0.98
"""Weight of the former observations at each new one: the last fifty or so count."""
_LEAST_SPREAD: Final = 0.1
"""Standard deviation of the batch sizes, as a share of their mean, from which a line is fitted."""


class StepTimeModel:
    """Fits ``seconds = base + slope * running`` to the observed steps by least squares; old ones fade.

    Where the batches were all of about one size, the slope cannot be seen and stays as it was. Before the first one is
    seen, the step is taken as proportional to the batch, which promises too little for an engine that keeps its goal.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope = 0.0  # 0: not seen yet

    def observe(self, running: float, seconds: float) -> None:
        """Take the mean step of an engine with a batch of ``running`` requests, more than none."""
        self._n = self._n * _KEPT + 1
        self._x = self._x * _KEPT + running
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + running * running
        self._xy = self._xy * _KEPT + running * seconds
        x, y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - x * x
        if variance > (_LEAST_SPREAD * x) ** 2:
            self._slope = max((self._xy / self._n - x * y) / variance, 0.0)

    def largest_batch(self, seconds: float) -> float:
        """Return the requests of the largest batch whose step takes at most ``seconds``; 0: nothing was observed."""
        if not self._n:
            return 0.0
        base, slope = self._line()
        return max((seconds - base) / slope, 1.0)

    def step_seconds(self, running: float) -> float:
        """Return how long the step of such a batch takes; 0: nothing was observed."""
        if not self._n:
            return 0.0
        base, slope = self._line()
        return base + slope * running

    def _line(self) -> tuple[float, float]:
        x, y = self._x / self._n, self._y / self._n
        slope = min(self._slope or y / x, y / x)  # a larger one would promise steps that take no time
        return y - slope * x, slope
