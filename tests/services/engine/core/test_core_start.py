"""Tests that a core is killed when it hangs, and not while it only takes its time."""

import itertools
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tokenloom.engine_core.control.step_watchdog import Pulse
from tokenloom.services.engine.core import core_start as core_watch
from tokenloom.services.engine.core.core_start import STOPPED_SECONDS, TICK_SECONDS, CoreWatchdog


class FakeCore:
    """Shows the pulse that the test sets."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid
        self.shown: Pulse | None = Pulse(1, 0.0)
        self.killed = ""

    def pulse(self) -> Pulse | None:
        return self.shown

    def kill(self, reason: str) -> None:
        self.killed = reason


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield psutil.Process(child.pid)
        child.kill()


def looks_until_hung(watch: CoreWatchdog, most: int = 1000) -> int | None:
    """Return the number of the look that found the core hanging."""
    return next((number for number in range(1, most + 1) if watch.look()), None)


def test_a_step_that_takes_longer_than_its_limit() -> None:
    core = FakeCore()
    watch = CoreWatchdog(core)
    core.shown = Pulse(7, 3.0)
    assert looks_until_hung(watch) == 3.0 / TICK_SECONDS + 2, "the first look sees a new beat"


def test_steps_that_end_and_a_core_without_work_do_not_hang() -> None:
    core = FakeCore()
    watch = CoreWatchdog(core)
    for beat in range(100):
        core.shown = Pulse(beat, 0.3)
        assert not watch.look()
    core.shown = Pulse(100, 0.0)
    assert looks_until_hung(watch) is None
    core.shown = None
    assert looks_until_hung(watch) is None


def test_the_limit_is_the_step_s_own() -> None:
    core = FakeCore()
    watch = CoreWatchdog(core)
    core.shown = Pulse(1, 60.0)
    assert looks_until_hung(watch, most=230) is None
    core.shown = Pulse(2, 3.0)
    assert not watch.look(), "the long step has ended"
    assert looks_until_hung(watch) is not None


@pytest.mark.parametrize(("waited", "share"), [(0.0, 1.0), (0.5, 0.5), (0.75, 0.25), (3.0, 0.2)])
def test_time_without_a_processor_does_not_count(monkeypatch: pytest.MonkeyPatch, waited: float, share: float) -> None:
    """``waited``: by how many times the interval of the looks all threads have waited together."""
    seconds = itertools.count(0.0, waited * TICK_SECONDS)
    monkeypatch.setattr(core_watch, "waited_seconds", lambda pid: next(seconds))
    core = FakeCore()
    core.shown = Pulse(1, 3.0)
    looks = looks_until_hung(CoreWatchdog(core))
    assert looks == pytest.approx(3.0 / TICK_SECONDS / share, abs=3)


def test_how_long_threads_waited_for_a_processor(process: psutil.Process) -> None:
    assert 0 <= core_watch.waited_seconds(process.pid) < 600
    assert core_watch.waited_seconds(None) == 0


def test_a_stopped_process(process: psutil.Process) -> None:
    watch = CoreWatchdog(FakeCore(process.pid))
    assert looks_until_hung(watch, most=50) is None
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass
    assert looks_until_hung(watch) == STOPPED_SECONDS / TICK_SECONDS + 1
    process.resume()
    while process.status() == psutil.STATUS_STOPPED:
        pass
    assert not watch.look()


async def test_the_core_is_killed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_watch, "TICK_SECONDS", 0.001)
    core = FakeCore()
    core.shown = Pulse(1, 0.004)
    await CoreWatchdog(core).run()
    assert core.killed == "a step of the engine core takes longer than 0.0 s"
    assert core.killed in caplog.text
