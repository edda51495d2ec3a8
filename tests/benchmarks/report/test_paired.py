"""Tests the interval of paired ratios, and what it decides."""

import math
from random import Random

import pytest

from tokenloom.bench.report.paired import FEWEST, Interval, Verdict, paired


def test_fewer_pairs_than_the_confidence_takes_say_nothing() -> None:
    assert FEWEST == 6
    few = Interval.of([0.5] * (FEWEST - 1))
    assert (few.median, few.low, few.high) == (0.5, 0.0, math.inf)
    assert few.verdict(0.03) is Verdict.UNDECIDED
    assert Interval.of([0.5] * FEWEST).verdict(0.03) is Verdict.SLOWER


def test_an_interval_leaves_out_the_ends() -> None:
    assert Interval.of([0.9, 1.0, 1.1, 1.2, 1.3, 1.4]) == Interval(pytest.approx(1.15), 0.9, 1.4)
    assert Interval.of([*range(1, 21)]) == Interval(10.5, 6, 15)  # of the binomial distribution of 20


def test_an_interval_contains_the_median_as_often_as_it_says() -> None:
    random = Random(5)
    intervals = [Interval.of([random.lognormvariate(0.0, 0.05) for _ in range(12)]) for _ in range(2000)]
    assert 0.95 < sum(each.low <= 1.0 <= each.high for each in intervals) / len(intervals) < 0.98


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.90, 0.97, Verdict.SLOWER),
        (0.90, 0.98, Verdict.UNDECIDED),
        (0.98, 1.10, Verdict.HOLDS),
        (1.10, 1.20, Verdict.HOLDS),
    ],
)
def test_only_a_whole_interval_decides(low: float, high: float, verdict: Verdict) -> None:
    assert Interval(1.0, low, high).verdict(0.03) is verdict


def test_a_drift_of_the_machine_cancels_in_a_b_b_a() -> None:
    speeds = [100.0, 98.0, 96.04, 94.1192]  # each turn is 2 % slower than the one before
    assert paired([speeds[0], speeds[3]], [speeds[1], speeds[2]]) == pytest.approx(1.0)
