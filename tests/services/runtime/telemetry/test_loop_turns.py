"""The CPU time of an event loop's turns, as its metrics show it."""

import asyncio

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.tasks import first_of
from tokenloom.services.runtime.telemetry.process_metrics import LoopTurns

LONGEST = "tokenloom_event_loop_longest_turn_seconds"
TURNS = "tokenloom_event_loop_turn_seconds"


def test_the_longest_turn_is_kept() -> None:
    times = iter([1.0, 1.001, 1.031, 1.032, 1.033])
    registry = CollectorRegistry()
    turns = LoopTurns(registry, lambda: next(times))
    for _ in range(4):
        turns.observe()
    assert registry.get_sample_value(TURNS + "_count") == 3
    assert registry.get_sample_value(TURNS + "_bucket", {"le": "0.02"}) == 2
    assert round(registry.get_sample_value(LONGEST) or 0.0, 6) == 0.03
    turns.observe()
    assert round(registry.get_sample_value(LONGEST) or 0.0, 6) == 0.03, "scrapes do not reset it"


async def test_a_turn_of_the_loop_is_observed() -> None:
    registry = CollectorRegistry()
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def work() -> None:
        sum(range(2_000_000))
        loop.call_later(0.005, done.set)

    loop.call_later(0.005, work)
    await first_of(LoopTurns(registry).run(), done.wait())
    assert (registry.get_sample_value(LONGEST) or 0.0) > 0.002
