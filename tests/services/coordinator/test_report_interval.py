"""Tests how often engines are asked to report."""

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.coordinator.report_interval import MAX_REPORTS_PER_SECOND, report_interval


def test_the_interval_grows_with_the_engines() -> None:
    assert [report_interval(count) for count in (0, 1, 150, 151, 500, 1000, 1001, 5000)] == [
        *(0.03, 0.03, 0.03, 0.06, 0.1, 0.2, 0.4, 1.0)
    ]
    assert report_interval(100_000) == 1.0


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_reports_stay_below_what_a_coordinator_reads(counts: list[int]) -> None:
    interval = report_interval(0)
    for count in counts:
        interval = report_interval(count, interval)
        assert count / interval <= MAX_REPORTS_PER_SECOND + 1e-6


def test_an_engine_that_comes_and_goes_does_not_change_it() -> None:
    interval = report_interval(1001)
    assert [report_interval(count, interval) for count in (1000, 1001, 999)] == [interval] * 3
    assert report_interval(800, interval) == 0.2
