import asyncio
from collections.abc import Callable
from unittest.mock import create_autospec

import pytest

from tokenloom.services.engine.streams.frame_builder import FramePace


class FakeLoop:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.handle: asyncio.TimerHandle = create_autospec(asyncio.TimerHandle, instance=True)

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append((self.now + delay, callback))
        return self.handle

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [callback for at, callback in self.timers if at <= self.now]
        self.timers = [timer for timer in self.timers if timer[0] > self.now]
        for callback in due:
            callback()


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def woken() -> list[bool]:
    return []


@pytest.fixture
def pace(loop: FakeLoop, woken: list[bool]) -> FramePace:
    return FramePace(0.008, lambda: woken.append(True), loop)


def test_a_frame_after_a_pause_goes_at_once(pace: FramePace, loop: FakeLoop) -> None:
    assert pace.is_due(urgent=False)
    pace.sent(16)
    loop.advance(0.009)
    assert pace.is_due(urgent=False)
    assert not loop.timers


def test_few_streams_wait_half_as_long(pace: FramePace, loop: FakeLoop) -> None:
    pace.sent(15)
    loop.advance(0.0045)
    assert pace.is_due(urgent=False)


def test_a_frame_that_waits_goes_with_the_first_step_after_the_interval(
    pace: FramePace, loop: FakeLoop, woken: list[bool]
) -> None:
    pace.sent(16)
    loop.advance(0.0045)
    assert not pace.is_due(urgent=False)
    loop.advance(0.0045)
    assert not woken, "the step wakes the stream, no timer does"
    assert pace.is_due(urgent=False)
    pace.sent(16)
    loop.handle.cancel.assert_called_once_with()  # type: ignore[attr-defined]


def test_without_another_step_it_is_called_for_once_after_half_an_interval_more(
    pace: FramePace, loop: FakeLoop, woken: list[bool]
) -> None:
    pace.sent(16)
    loop.advance(0.004)
    assert not pace.is_due(urgent=False)
    assert not pace.is_due(urgent=False)
    assert len(loop.timers) == 1
    loop.advance(0.0079)
    assert not woken
    loop.advance(0.0002)
    assert woken == [True]
    assert pace.is_due(urgent=False)


def test_what_is_urgent_does_not_wait(pace: FramePace, loop: FakeLoop) -> None:
    pace.sent(16)
    assert pace.is_due(urgent=True)
    assert not loop.timers


def test_without_an_interval_nothing_waits(loop: FakeLoop) -> None:
    pace = FramePace(0, lambda: None, loop)
    pace.sent(16)
    assert pace.is_due(urgent=False)


def test_closing_takes_the_call_back(pace: FramePace, loop: FakeLoop) -> None:
    pace.sent(16)
    assert not pace.is_due(urgent=False)
    pace.close()
    loop.handle.cancel.assert_called_once_with()  # type: ignore[attr-defined]
