"""Tests how often engines are asked to report."""

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.coordinator.coordinator_servicer import WATCH_SECONDS
from tokenloom.services.coordinator.engines.engine_stream import MAX_REPORTS_PER_SECOND, ReportPace, report_interval


def test_the_interval_grows_with_the_engines() -> None:
    assert [report_interval(count) for count in (2, 150, 151, 500, 1000, 1001, 5000)] == [
        *(0.03, 0.03, 0.06, 0.1, 0.2, 0.4, 1.0)
    ]
    assert report_interval(100_000) == 1.0


def test_the_only_engine_reports_as_often_as_it_is_shown() -> None:
    assert [report_interval(count) for count in (0, 1)] == [WATCH_SECONDS] * 2
    assert report_interval(2, before=WATCH_SECONDS) == 0.03


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


def followed(pace: ReportPace, num_engines: int, late_seconds: float, begin: float, seconds: float) -> float:
    """The interval after so many seconds, by ten looks a second."""
    for tick in range(round(seconds * 10)):
        pace.follow(num_engines, late_seconds, begin + tick / 10)
    return pace.interval


def test_a_loop_that_is_late_gets_fewer_reports_and_more_again_when_it_is_not() -> None:
    pace = ReportPace()
    assert followed(pace, 1000, 0.01, 100.0, 5.0) == 0.2
    assert followed(pace, 1000, 1.0, 105.0, 1.5) == 0.4, "soon, but one step at a time"
    assert followed(pace, 1000, 1.0, 106.5, 60.0) == 1.0
    assert followed(pace, 1000, 0.0, 166.5, 15.0) == 1.0, "not at once: what made it late may come back"
    assert followed(pace, 1000, 0.0, 181.5, 30.0) < 1.0
    assert followed(pace, 1000, 0.0, 211.5, 120.0) == 0.2


def test_one_long_turn_and_the_turns_of_a_small_mesh_change_nothing() -> None:
    pace = ReportPace()
    followed(pace, 1000, 0.01, 100.0, 5.0)
    assert pace.follow(1000, 0.9, 105.0) == 0.2
    assert followed(pace, 1000, 0.01, 105.1, 5.0) == 0.2
    assert followed(ReportPace(), 100, 5.0, 100.0, 60.0) == 0.03
