"""Summarizes many measured values."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest ranks, as numpy does; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Distribution:
    """Holds mean, median, spread and percentiles of one measure; all are NaN without values."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percents: Sequence[float] = (99,)) -> "Distribution":
        return cls(
            count=len(values),
            mean=statistics.fmean(values) if values else math.nan,
            median=percentile(values, 50),
            std=statistics.pstdev(values) if values else math.nan,
            percentiles={percent: percentile(values, percent) for percent in percents},
        )

    def fields(self, name: str) -> dict[str, float | None]:
        """Return ``mean_ttft_ms``, ``p99_ttft_ms`` and so on, named as in `vllm bench serve`; None for NaN."""
        values = {f"mean_{name}": self.mean, f"median_{name}": self.median, f"std_{name}": self.std}
        values |= {f"p{percent:g}_{name}": value for percent, value in self.percentiles.items()}
        return {key: None if math.isnan(value) else round(value, 4) for key, value in values.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and range of repeats."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}
