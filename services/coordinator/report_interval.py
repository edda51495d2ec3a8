"""Decides how often engines report. No I/O."""

from collections.abc import Iterator

MAX_REPORTS_PER_SECOND = 5000
"""Reports of all engines together, which one core reads beside its other work."""
_STEPS = (0.03, 0.06, 0.1, 0.2, 0.4, 1.0)
"""Seconds between two reports of an engine. The coordinator counts its own picks at once, so that a slower report only
delays the news of what has ended."""
_RETURN_SHARE = 0.8
"""A shorter interval is chosen only when the engines are so much fewer than it allows, so that it does not change with
each engine that comes and goes."""


def report_interval(num_engines: int, before: float = _STEPS[0]) -> float:
    """Return how many seconds engines should let pass between two reports. ``before``: what was chosen last."""
    return next(_allowed(num_engines, before), _STEPS[-1])


def _allowed(num_engines: int, before: float) -> Iterator[float]:
    for step in _STEPS:
        most = step * MAX_REPORTS_PER_SECOND * (_RETURN_SHARE if step < before else 1.0)
        if num_engines <= most:
            yield step
