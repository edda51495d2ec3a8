"""Tests the simulation of placement without the coordinator on a few engines."""

import pytest

from tokenloom.bench.scale.without_coordinator import Case, Run, Trace, measure, requests

TRACE = Trace(prefixes=8, prefix_tokens=(64, 128), suffix_tokens=(16, 32), output_tokens=(2, 8))
CASE = Case(rate=30.0, engines=4, processors=4, dies_at=1.0, settles_at=2.0, ends_at=3.0)


@pytest.mark.parametrize("dies_at", [None, CASE.dies_at])
def test_every_request_ends_and_no_pick_stays_counted(dies_at: float | None) -> None:
    drawn = requests(TRACE, CASE.rate, CASE.ends_at, CASE.processors, seed=0)
    run = Run(TRACE, drawn, CASE, dies_at)
    run.run(CASE.ends_at)
    assert all(each.first_token_at > each.at for each in drawn)
    assert not any(engine.waiting or engine.running for engine in run.engines.values())
    assert not any(sum(processor._picks.values()) for processor in run._processors)


def test_the_same_seed_gives_the_same_times() -> None:
    first, second = (measure(TRACE, CASE, 3, has_coordinator=False) for _ in range(2))
    assert first == second
    assert first != measure(TRACE, CASE, 4, has_coordinator=False)
