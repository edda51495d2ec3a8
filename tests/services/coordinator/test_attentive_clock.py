"""The time for which the coordinator itself was busy makes no engine silent."""

import asyncio

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.services.coordinator.attentive_clock import LONGEST_SECONDS, TICK_SECONDS, AttentiveClock


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_keeps_time_while_it_ticks() -> None:
    time = Time()
    clock = AttentiveClock(time)
    begin = clock()
    for _ in range(20):
        time.now += TICK_SECONDS
        clock.tick()
    time.now += 0.125
    assert clock() - begin == pytest.approx(20 * TICK_SECONDS + 0.125)


def test_a_pause_counts_as_one_tick() -> None:
    time = Time()
    clock = AttentiveClock(time)
    begin = clock()
    time.now += 5.0
    assert clock() - begin == LONGEST_SECONDS
    clock.tick()
    time.now += 0.125
    assert clock() - begin == LONGEST_SECONDS + 0.125


async def test_it_ticks_while_it_runs() -> None:
    time = Time()
    clock = AttentiveClock(time)
    begin = clock()
    running = asyncio.create_task(clock.run())
    await settle()
    for _ in range(8):
        time.now += TICK_SECONDS
        pass_time(TICK_SECONDS)
        await settle()
    assert clock() - begin == pytest.approx(8 * TICK_SECONDS)
    running.cancel()
