"""Tests ``bench scale`` with a few engines, and what it makes of its figures."""

import os
from dataclasses import replace

import pytest

from benchmarks.scale import child, offered_picks, registry_case
from benchmarks.scale.offered_picks import StreamResult
from benchmarks.scale.picks import IndexMemory, PickCost
from benchmarks.scale.registry_case import RegistryCase, RegistryResult, run_registry
from benchmarks.scale.scale import cores_at_full_rate, exceeded, figures_of, table

RESULT = RegistryResult(
    engines=1000,
    followers=200,
    reports_per_second=2500.0,
    cores=0.4,
    loop_cores=0.3,
    microseconds_a_report=160.0,
    megabytes_per_second=14.0,
    follower_share=0.004,
    mebibytes=300.0,
    dead=0,
    join_seconds=4.0,
    rejoin_cpu_seconds=2.0,
    refused=0,
    asked=900,
    picks=(
        StreamResult(
            0,
            10_000,
            8000.0,
            2.0,
            9.0,
            7.0,
            0.1,
            cores=0.6,
            loop_cores=0.4,
            microseconds_a_pick=75.0,
            most_per_second=8100.0,
            share_p99_milliseconds=8.0,
            share_here_p99_milliseconds=5.0,
        ),
        StreamResult(
            256,
            5000,
            5000.0,
            2.0,
            9.5,
            8.0,
            0.1,
            cores=0.9,
            loop_cores=0.7,
            microseconds_a_pick=180.0,
            most_per_second=6000.0,
            share_p99_milliseconds=9.0,
            share_here_p99_milliseconds=6.0,
        ),
    ),
)
COST, MEMORY = PickCost(1000, 40.0, 140.0), IndexMemory(1000, 60.0, 300.0)


async def test_fake_engines_join_report_and_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "REMOTE_POLICY", os.SCHED_OTHER)  # other tests run beside this one
    monkeypatch.setattr(registry_case, "_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(registry_case, "RATES", ((200, 0), (100, 256)))
    monkeypatch.setattr(offered_picks, "_WARM_UP_SECONDS", 0.1)
    result = await run_registry(RegistryCase(engines=3, followers=2, seconds=0.5))
    assert result.reports_per_second > 3  # more often than idle engines
    assert result.asked > 0
    assert [picks.hashes for picks in result.picks] == [0, 256]
    assert all(picks.here_p99_milliseconds > 0 and picks.most_per_second > 0 for picks in result.picks)
    assert all(picks.share_p99_milliseconds > 0 and picks.share_here_p99_milliseconds > 0 for picks in result.picks)
    assert (result.dead, result.refused) == (0, 0)


def test_cores_are_given_for_the_full_rate_of_reports() -> None:
    assert cores_at_full_rate(RESULT) == pytest.approx(0.8)
    assert cores_at_full_rate(replace(RESULT, reports_per_second=5000.0)) == pytest.approx(0.4)
    few = replace(RESULT, engines=10, reports_per_second=330.0)
    assert cores_at_full_rate(few) == pytest.approx(0.4)


def test_limits_that_do_not_hold_are_named() -> None:
    assert exceeded(figures_of(RESULT, COST, MEMORY)) == []
    worse = figures_of(replace(RESULT, cores=0.6, refused=1), replace(COST, with_hashes=151.0), MEMORY)
    assert exceeded(worse) == ["hashed_pick_microseconds", "cores_at_full_rate", "refused"]


def test_the_cores_of_picks_are_given_for_all_that_were_asked() -> None:
    figures = figures_of(RESULT, COST, MEMORY)
    assert figures["picks_cores_at_full_rate"] == pytest.approx(0.75)
    assert figures["hashed_picks_cores_at_full_rate"] == pytest.approx(0.9)


def test_the_table_has_a_column_for_each_mesh() -> None:
    report = {"cases": [figures_of(replace(RESULT, engines=count), COST, MEMORY) for count in (10, 1000)]}
    assert len(table(report).columns) == 4
