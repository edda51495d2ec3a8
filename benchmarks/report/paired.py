"""Compares two versions by runs in pairs: an interval for their ratio, and what it decides. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

CONFIDENCE = 0.95
"""How often, at least, an interval contains the median of all pairs that there could be."""
FEWEST = next(pairs for pairs in range(1, 100) if 1 - 2 / 2**pairs >= CONFIDENCE)
"""Fewer pairs give no interval of that confidence, whatever their ratios."""


class Verdict(StrEnum):
    """What an interval says of a figure."""

    SLOWER = "slower"
    """Worse by more than the limit."""
    HOLDS = "holds"
    """Not worse by more than the limit."""
    UNDECIDED = "undecided"
    """The limit is within the interval: the noise is larger than what should be seen."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds the median of ratios and where the ratio lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Interval":
        """Return the interval of independent ratios by the sign test: it assumes nothing about how they vary. Fewer
        than :data:`FEWEST` say nothing."""
        ordered = sorted(ratios)
        below = _ignored(len(ordered))
        if below is None:
            return cls(median(ordered), 0.0, math.inf)
        return cls(median(ordered), ordered[below], ordered[-1 - below])

    def verdict(self, limit: float) -> Verdict:
        """Compare with a limit: ratios above 1 are better, and ``limit`` is the share that may be lost."""
        worst = 1 / (1 + limit)
        if self.high < worst:
            return Verdict.SLOWER
        return Verdict.HOLDS if self.low >= worst else Verdict.UNDECIDED


def paired(base: Sequence[float], ours: Sequence[float]) -> float:
    """Return the ratio of two versions in a few turns, in which each ran as often first as second: the geometric mean,
    in which a steady drift of the machine, and what it costs to run second, cancel."""
    return math.exp(sum(math.log(b / a) for a, b in zip(base, ours, strict=True)) / len(base))


def _ignored(pairs: int) -> int | None:
    """Return how many of the ordered ratios to leave out at each end; None if even all of them are too few."""
    outside, ignored = 2.0, None  # the chance that the median lies outside, in units of 2 ** -pairs
    for each in range(pairs // 2 + 1):
        if outside / 2**pairs > 1 - CONFIDENCE:
            break
        ignored = each
        outside += 2 * math.comb(pairs, each + 1)
    return ignored
