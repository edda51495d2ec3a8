"""Decides how often engines report: by their number, and by how late the coordinator is with its work. No I/O."""

from collections.abc import Iterator

MAX_REPORTS_PER_SECOND = 5000
"""Reports of all engines together, which one core reads beside its other work."""
_STEPS = (0.03, 0.06, 0.1, 0.2, 0.4, 1.0)
"""Seconds between two reports of an engine. The coordinator counts its own picks at once, so that a slower report only
delays the news of what has ended."""
_ALONE_SECONDS = 0.1
"""Between two reports of the only engine: picks do not compare it, and snapshots show it no more often."""
_RETURN_SHARE = 0.8
"""A shorter interval is chosen only when the engines are so much fewer than it allows, so that it does not change with
each engine that comes and goes."""

_FEW_ENGINES = 100
"""Their reports do not keep an event loop busy."""
_BUSY_SECONDS, _CALM_SECONDS = 0.2, 0.05
"""The event loop is busy when its turns are so late on average, and has time for more reports when they are not."""
_SHARE_OF_NEWEST = 0.2  # of the moving average
_LONGER_AFTER, _SHORTER_AFTER = 2.0, 20.0
"""Seconds until the interval changes again: reports on their way come at the old one, and what kept the loop busy may
come back."""


class ReportPace:
    """Follows the number of engines and the event loop of one coordinator.

    A loop that has no time for all reports falls behind, more with each second, and then knows loads of long ago. Fewer
    reports in time are better: its own picks it counts at once.

    Attributes:
        interval: Seconds between two reports of an engine.
    """

    def __init__(self) -> None:
        self.interval = self._of_number = report_interval(0)
        self._steps_longer = 0
        self._late = 0.0
        self._changed_at = 0.0

    def follow(self, num_engines: int, late_seconds: float, now: float) -> float:
        """Return the interval. To be called several times a second.

        ``late_seconds``: by how much the loop was late this time.
        """
        self._late += _SHARE_OF_NEWEST * (late_seconds - self._late)
        self._of_number = report_interval(num_engines, self._of_number)
        if num_engines <= _FEW_ENGINES:
            self._steps_longer = 0
        elif self._late > _BUSY_SECONDS:
            # At the longest step too, by 0: this moves the time of the last change, so that the interval stays long for
            # 20 s after the last lateness. Counted from the last step, it would get shorter while the loop is still
            # late.
            self._change(1 if self.interval < _STEPS[-1] else 0, now, _LONGER_AFTER)
        elif self._late < _CALM_SECONDS:
            self._change(-1, now, _SHORTER_AFTER)
        step = min(_STEPS.index(self._of_number) + self._steps_longer, len(_STEPS) - 1)
        self.interval = _STEPS[step]
        return self.interval

    def _change(self, steps: int, now: float, seconds: float) -> None:
        """Change the interval, unless the last change was less than so many seconds ago."""
        if now >= self._changed_at + seconds:
            self._steps_longer = max(self._steps_longer + steps, 0)
            self._changed_at = now


def report_interval(num_engines: int, before: float = _STEPS[0]) -> float:
    """Return how many seconds engines should let pass between two reports. ``before``: what was chosen last."""
    if num_engines <= 1:
        return _ALONE_SECONDS
    return next(_allowed(num_engines, before), _STEPS[-1])


def _allowed(num_engines: int, before: float) -> Iterator[float]:
    for step in _STEPS:
        # A report costs about 100 µs in gRPC for Python, whatever it holds: at one every 30 ms a thousand engines sent
        # 33,000 a second.
        most = step * MAX_REPORTS_PER_SECOND * (_RETURN_SHARE if step < before else 1.0)
        if num_engines <= most:
            yield step
