"""The rules in a short simulation: the figures are those of a fixed seed, the bounds those that hold for any."""

from functools import cache

import pytest

from tokenloom.bench.placement.placers import PLACERS
from tokenloom.bench.placement.simulation import Result, simulate
from tokenloom.bench.placement.traces import TRACES

MIXED, PREFIXES, LONG_PREFIXES = TRACES


@cache
def result(trace: int, placer: str) -> Result:
    return simulate(TRACES[trace], PLACERS[placer], seed=1, seconds=6.0)


def test_the_same_seed_gives_the_same_result() -> None:
    assert simulate(MIXED, PLACERS["cost"], 1, 2.0) == simulate(MIXED, PLACERS["cost"], 1, 2.0)


@pytest.mark.parametrize(("trace", "ratio"), [(0, 1.05), (1, 0.9), (2, 0.7)])
def test_cost_is_no_worse_than_score(trace: int, ratio: float) -> None:
    assert result(trace, "cost").p99 <= ratio * result(trace, "score, 4 k").p99
    assert result(trace, "cost").imbalance < 2


def test_blind_rules_find_less_in_the_caches() -> None:
    assert result(2, "cost").cached > 1.3 * result(2, "round robin").cached
