"""The time for which a process itself was busy makes no peer of it silent."""

import asyncio

import pytest

from tests.loop_clock import pass_time
from tokenloom.services.runtime import liveness
from tokenloom.services.runtime.liveness import LONGEST_TURN_SECONDS, LivenessTimer, answered, is_late


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def looks_until(timer: LivenessTimer, time: Time, seconds: float, turn: float) -> int:
    """Return how many looks find that less is owed."""
    looks = 0
    time.now += turn
    while timer.look(owes=True) < seconds:
        looks += 1
        time.now += turn
    return looks


def test_what_is_owed_adds_up_however_often_one_looks() -> None:
    time = Time()
    assert looks_until(LivenessTimer(time), time, 10.0, 0.5) == 19
    assert looks_until(LivenessTimer(time), time, 10.0, 0.25) == 39


def test_it_begins_anew_when_nothing_is_owed_and_when_it_has_come() -> None:
    time = Time()
    timer = LivenessTimer(time)
    assert looks_until(timer, time, 9.5, 0.5) == 18
    time.now += 0.5
    assert timer.look(owes=False) == 0.0
    assert looks_until(timer, time, 9.5, 0.5) == 18
    timer.owed = 0.0
    assert looks_until(timer, time, 10.0, 0.5) == 19


def test_a_pause_of_this_process_is_a_short_turn() -> None:
    time = Time()
    timer = LivenessTimer(time)
    time.now += 3600
    assert timer.look(owes=True) == 0.5
    assert looks_until(timer, time, 10.0, 0.5) == 18


async def test_a_timer_is_late_where_this_process_stood_still() -> None:
    due = asyncio.get_running_loop().time() + 10
    pass_time(10 + LONGEST_TURN_SECONDS - 0.1)
    assert not is_late(due)
    pass_time(0.2)
    assert is_late(due)


async def test_a_call_may_take_long_while_its_peer_answers() -> None:
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asked = []

    async def ask() -> None:
        asked.append(call.done())
        if len(asked) == 3:
            call.set_result(7)

    assert await answered(call, ask, quiet=0.0) == 7
    assert asked == [False] * 3


@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_ends_whose_peer_is_silent(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 1000.0 if fails else 0.0)
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        if fails:
            raise OSError("no connection")
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await answered(call, ask, quiet=0.0)
    assert call.cancelled()


async def test_a_call_that_ends_while_its_peer_is_asked_counts() -> None:
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        call.set_exception(ValueError("refused"))
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="refused"):
        await answered(call, ask, quiet=0.0)


async def test_who_waits_takes_the_call_along() -> None:
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        raise AssertionError("it is not asked yet")

    waiting = asyncio.create_task(answered(call, ask, quiet=1000.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.cancelled()
