"""A process that ends, or takes too much, affects only the message that it was given."""

import asyncio
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tokenloom.process.helper_pipe import OUT_OF_MEMORY
from tokenloom.request import errors
from tokenloom.services.runtime import helper_process
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess


class Scripted:
    """A process that answers with what it was sent, or ends with a status."""

    def __init__(self, status: int | None = None, error: type[Exception] = ConnectionResetError) -> None:
        self.reader = asyncio.StreamReader()
        self.status, self._error = status, error
        self.was_killed = self.was_stopped = False

    async def talk(self, request: bytes, seconds: float, files: Sequence[int] = ()) -> bytes:
        if self.status is not None:
            raise self._error
        return request

    async def kill(self) -> int:
        self.was_killed = True
        return self.status or 0


def pool_of(make: Callable[[], Scripted], size: int = 1) -> tuple[HelperPool, list[Scripted]]:
    started: list[Scripted] = []

    async def start() -> HelperProcess:
        started.append(make())
        return cast(HelperProcess, started[-1])

    return HelperPool(start, size, "do it", 5.0), started


async def test_a_process_is_used_again() -> None:
    pool, started = pool_of(Scripted)
    assert [await pool.run(b"a"), await pool.run(b"b")] == [b"a", b"b"]
    assert len(started) == 1
    await pool.close()
    assert started[0].was_killed


async def test_a_process_that_ended_while_it_was_idle_costs_nothing() -> None:
    pool, started = pool_of(Scripted)
    await pool.run(b"a")
    started[0].reader.feed_eof()
    assert await pool.run(b"b") == b"b"
    assert [each.was_killed for each in started] == [True, False]


@pytest.mark.parametrize(
    ("status", "error", "message", "num_started"),
    [
        (-signal.SIGKILL, errors.Internal, "3 processes ended that were to do it", 3),
        (OUT_OF_MEMORY, errors.ResourceExhausted, "too much memory to do it", 1),
        (-signal.SIGABRT, errors.ResourceExhausted, "too much memory to do it", 1),
        (-signal.SIGPROF, errors.DeadlineExceeded, "too much processor time to do it", 1),
    ],
)
async def test_how_a_process_ends_says_whose_fault_it_was(
    status: int, error: type[errors.TokenloomError], message: str, num_started: int
) -> None:
    pool, started = pool_of(lambda: Scripted(status))
    with pytest.raises(error, match=message):
        await pool.run(b"a")
    assert len(started) == num_started
    assert all(each.was_killed for each in started)


async def test_a_machine_that_stops_processes_is_no_fault_of_the_message() -> None:
    """Where every process stood still again and again, a long text counted as one that ends processes."""

    def stopped() -> Scripted:
        process = Scripted(-signal.SIGKILL)
        process.was_stopped = True
        return process

    pool, started = pool_of(stopped)
    with pytest.raises(errors.Unavailable, match="stops the processes that are to do it"):
        await pool.run(b"a")
    assert len(started) == 3


async def test_a_machine_that_is_too_busy_is_no_ones_fault() -> None:
    pool, started = pool_of(lambda: Scripted(0, TimeoutError))
    with pytest.raises(errors.Unavailable, match="too busy to do it"):
        await pool.run(b"a")
    assert started[0].was_killed


@pytest.mark.parametrize("failure", [BlockingIOError("none is left"), errors.InvalidArgument("wrong", "model")])
async def test_a_process_that_does_not_start_is_wrong_at_the_start_only(failure: Exception) -> None:
    async def start() -> HelperProcess:
        raise failure

    pool = HelperPool(start, 1, "do it", 5.0)
    with pytest.raises(errors.Unavailable, match="does not start"):
        await pool.run(b"a")
    with pytest.raises(errors.InvalidArgument if isinstance(failure, errors.InvalidArgument) else errors.Unavailable):
        await pool.start()


async def test_a_process_whose_caller_is_cancelled_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, started, spawn = threading.Event(), list["subprocess.Popen[bytes]"](), helper_process._spawn

    def spawn_late(*arguments: Any) -> "subprocess.Popen[bytes]":
        may_start.wait()
        started.append(spawn(*arguments))
        return started[0]

    monkeypatch.setattr(helper_process, "_spawn", spawn_late)
    launching = asyncio.create_task(HelperProcess.launch("tests.services.runtime.reading_helper"))
    await asyncio.sleep(0)
    launching.cancel()
    await asyncio.sleep(0)
    may_start.set()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert started[0].returncode == -signal.SIGKILL


async def test_a_process_gets_files_with_a_message(tmp_path: Path) -> None:
    process = await HelperProcess.launch("tests.services.runtime.reading_helper")
    try:
        for content in (b"first", b"second" * 100_000):
            (tmp_path / "file").write_bytes(content)
            with (tmp_path / "file").open("rb") as file:
                answer = await process.talk(b"read" * 50_000, 60.0, [file.fileno()])
            assert answer == content
        assert await process.talk(b"none", 60.0) == b""
    finally:
        await process.kill()
