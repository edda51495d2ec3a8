"""What the picks in an engine's queue have to compute."""

from tokenloom.services.coordinator.engines.engine_record import ArrivedPicks
from tokenloom.v1.coordinator_pb2 import EngineReport


def test_the_picks_that_arrived_last_wait() -> None:
    picks = ArrivedPicks()
    for tokens in (100, 20, 3):
        picks.add(tokens)
    report = EngineReport(waiting=2, waiting_tokens=2000)
    picks.trim(report.waiting)
    assert picks.uncached_tokens(report) == 23
    picks.trim(0)
    assert picks.uncached_tokens(EngineReport()) == 0


def test_requests_of_others_count_in_full() -> None:
    picks = ArrivedPicks()
    picks.add(20)
    assert picks.uncached_tokens(EngineReport(waiting=4, waiting_tokens=4000)) == 20 + 3000
