"""Means, medians, percentiles."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.bench.report.stats import Distribution, percentile, spread


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_among_the_values_and_rises(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)
    assert percentile(values, percent) <= percentile(values, 100)
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (25, 2), (50, 3), (90, 4.6), (100, 5)])
def test_percentiles_are_numpys(percent: float, value: float) -> None:
    numpy = pytest.importorskip("numpy")
    assert percentile([5, 1, 4, 2, 3], percent) == pytest.approx(value) == numpy.percentile([5, 1, 4, 2, 3], percent)


def test_fields_are_named_as_in_vllm() -> None:
    fields = Distribution.of([1.0, 2.0, 6.0], (90, 99.9)).fields("ttft_ms")
    assert fields == {
        "mean_ttft_ms": 3.0,
        "median_ttft_ms": 2.0,
        "std_ttft_ms": pytest.approx(2.1602),
        "p90_ttft_ms": 5.2,
        "p99.9_ttft_ms": 5.992,
    }


def test_nothing_measured_is_no_number_and_null_in_json() -> None:
    nothing = Distribution.of([])
    assert math.isnan(nothing.mean)
    assert set(nothing.fields("x").values()) == {None}


def test_spread() -> None:
    assert spread([3, 1, 2]) == {"median": 2, "min": 1, "max": 3}
