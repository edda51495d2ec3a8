"""Tests a takeover of two real coordinators with a few fake engines, and what is made of its figures."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tokenloom.bench.scale import child
from tokenloom.bench.scale.askers import Coordinators
from tokenloom.bench.scale.takeover import takeover
from tokenloom.bench.scale.takeover.__main__ import missed, table
from tokenloom.bench.scale.takeover.pair import CoordinatorEnded, LeaseKind, Pair
from tokenloom.bench.scale.takeover.takeover import Takeover, medians, run_takeovers

RESULT = Takeover(
    listens=0.1, answers=0.4, engines_back=0.6, asked=900, by_snapshot=30, refused=0, old_answers=0, old_picks=0
)


async def test_another_coordinator_takes_over_and_no_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(child, "REMOTE_POLICY", os.SCHED_OTHER)  # other tests run beside this one
    (result,) = await run_takeovers("file lock", engines=3, rounds=1)
    assert result.asked > 0
    assert result.answers > 0
    assert (result.refused, result.old_answers, result.old_picks) == (0, 0, 0)


async def test_a_coordinator_that_ends_by_itself_ends_the_measurement(socket_dir: Path) -> None:
    pair = Pair(socket_dir, f"unix:{socket_dir}/c", ("", ""), LeaseKind(("tokenloom.services.coordinator",)))
    try:
        await pair.start()
        (coordinator,) = pair._running
        coordinator.kill()
        with pytest.raises(CoordinatorEnded):
            await pair.watch()
    finally:
        pair.close()


def test_an_asker_counts_late_answers_of_a_former_coordinator() -> None:
    coordinators = Coordinators()
    for epoch in (7, 7, 8, 7, 8):
        coordinators.note(epoch)
    counts = coordinators.counts()
    assert (counts["number"], counts["late"], counts["since"] > 0) == (2, 1, True)


def test_times_are_medians_and_requests_are_sums() -> None:
    slower, slowest = replace(RESULT, answers=0.5, refused=1), replace(RESULT, answers=9.0)
    assert medians([slowest, RESULT, slower]) == replace(RESULT, answers=0.5, asked=2700, by_snapshot=90, refused=1)


def test_missed_aims_are_named() -> None:
    assert missed(RESULT) == []
    assert missed(replace(RESULT, answers=3.1, refused=1, old_picks=2)) == ["answers", "refused", "old_picks"]


def test_the_table_has_a_column_for_each_mesh() -> None:
    assert len(table({("file lock", 10): RESULT, ("Lease", 1000): RESULT}, rounds=3).columns) == 4
