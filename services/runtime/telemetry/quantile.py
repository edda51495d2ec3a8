"""Estimates quantiles from the buckets of a histogram."""

from collections.abc import Mapping


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return the quantile, interpolated within its bucket as in Prometheus; None without observations.

    ``buckets``: the cumulative count of observations up to each bound.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = share * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / max(buckets[bound] - below, 1e-9)
        lower, below = bound, buckets[bound]
    return lower
