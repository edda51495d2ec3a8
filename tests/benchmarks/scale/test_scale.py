"""Tests ``bench scale`` with a few engines, and what it makes of its figures."""

from dataclasses import replace

import pytest

from benchmarks.scale import registry_case
from benchmarks.scale.registry_case import RegistryCase, RegistryResult, run_registry
from benchmarks.scale.scale import cores_at_full_rate, exceeded, figures_of, table

RESULT = RegistryResult(
    engines=1000,
    followers=200,
    reports_per_second=2500.0,
    cores=0.4,
    microseconds_a_report=160.0,
    megabytes_per_second=14.0,
    follower_share=0.004,
    mebibytes=300.0,
    dead=0,
    join_seconds=4.0,
    rejoin_cpu_seconds=2.0,
    refused=0,
    asked=900,
)


async def test_fake_engines_join_report_and_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_case, "_PAUSE_SECONDS", 0.5)
    result = await run_registry(RegistryCase(engines=3, followers=2, seconds=0.5))
    assert result.reports_per_second > 3  # more often than idle engines
    assert result.asked > 0
    assert (result.dead, result.refused) == (0, 0)


def test_cores_are_given_for_the_full_rate_of_reports() -> None:
    assert cores_at_full_rate(RESULT) == pytest.approx(0.8)
    assert cores_at_full_rate(replace(RESULT, reports_per_second=5000.0)) == pytest.approx(0.4)
    few = replace(RESULT, engines=10, reports_per_second=330.0)
    assert cores_at_full_rate(few) == pytest.approx(0.4)


def test_limits_that_do_not_hold_are_named() -> None:
    assert exceeded(figures_of(RESULT)) == []
    assert exceeded(figures_of(replace(RESULT, cores=0.6, refused=1))) == ["cores_at_full_rate", "refused"]


def test_the_table_has_a_column_for_each_mesh() -> None:
    report = {"cases": [figures_of(RESULT), figures_of(replace(RESULT, engines=10))]}
    assert len(table(report).columns) == 4
