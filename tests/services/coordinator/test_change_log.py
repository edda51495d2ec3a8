"""Watchers learn of a change in turns, so that something else may happen between them."""

import asyncio

from tests.loop_clock import settle
from tokenloom.services.coordinator.snapshot_feed import ChangeLog

NUM_WATCHERS = 100


async def test_all_watchers_are_told_but_not_in_one_turn() -> None:
    log, woken, turns = ChangeLog(1, lambda revision: b""), [], []

    async def watch(number: int) -> None:
        await log.changed()
        woken.append(number)

    tasks = [asyncio.create_task(watch(number)) for number in range(NUM_WATCHERS)]
    await settle()
    tasks.pop(50).cancel()
    log.add(2, b"")
    while len(woken) < NUM_WATCHERS - 1:
        await asyncio.sleep(0)
        turns.append(len(woken))
    assert woken == [number for number in range(NUM_WATCHERS) if number != 50]
    assert len(set(turns)) > 5
    await asyncio.gather(*tasks)


async def test_one_who_comes_meanwhile_waits_for_the_next_change() -> None:
    log = ChangeLog(1, lambda revision: b"")
    log.add(2, b"")
    late = asyncio.create_task(log.changed())
    await settle()
    assert not late.done()
    log.add(3, b"")
    await late
