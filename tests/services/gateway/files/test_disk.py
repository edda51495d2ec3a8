"""Calls in threads of the disk, and writes that a crash leaves whole."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.loop_clock import settle
from tests.services.gateway.files.failing_disk import Crashed, InlineThreads, Writes
from tokenloom.request.errors import Unavailable
from tokenloom.services.gateway.files.disk import NEW, Disk, write_atomically


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    disk = Disk(tmp_path)
    await disk.open()
    yield disk
    await disk.close()


async def test_a_cancelled_caller_goes_on_after_its_call(disk: Disk) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> int:
        begun.set()
        may_end.wait()
        ended.set()
        return 7

    known: list[int] = []
    caller = asyncio.create_task(disk.run(call, known.append))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        caller.cancel()
        await settle()
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    assert known == [7]


async def test_a_caller_that_is_cancelled_while_it_opens_a_file_closes_it(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    may_end = threading.Event()
    held: list[int] = []

    def opens() -> int:
        may_end.wait()
        held.append(os.open(tmp_path / "f", os.O_RDONLY))
        return held[0]

    async def read() -> None:
        async with disk.opened(opens, os.close):
            raise AssertionError("it was cancelled before")

    reader = asyncio.create_task(read())
    await settle()
    reader.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reader
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])


async def test_cleaning_up_is_possible_after_the_end(tmp_path: Path) -> None:
    for threads in (None, ThreadPoolExecutor(1)):
        disk = Disk(tmp_path, threads)
        await disk.open()
        path = tmp_path / "f"
        path.touch()
        await disk.close()
        with pytest.raises(Unavailable):
            await disk.run(path.unlink)
        await disk.run_anyway(path.unlink)
        assert not path.exists()


async def test_the_error_of_a_call_is_raised(tmp_path: Path) -> None:
    disk = Disk(tmp_path, InlineThreads())
    known: list[object] = []
    with pytest.raises(FileNotFoundError):
        await disk.run((tmp_path / "missing").unlink, known.append)
    assert not known


def test_writes_of_one_file_at_the_same_time_leave_one_of_them(tmp_path: Path) -> None:
    path = tmp_path / "f"
    contents = [bytes([number]) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            list(threads.map(lambda data: write_atomically(path, data), contents))
    assert path.read_bytes() in contents
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("step", range(8))
def test_a_crash_leaves_the_old_or_the_new_content(tmp_path: Path, step: int) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    with Writes(crash_at=step).watched() as writes:
        try:
            write_atomically(path, b"new content")
        except Crashed:
            assert path.read_bytes() in (b"old", b"new content")
            assert all(each.name == "f" or each.name.endswith(NEW) for each in tmp_path.iterdir())
        else:
            assert not writes.has_crashed
            assert path.read_bytes() == b"new content"


def test_a_full_disk_keeps_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    with Writes().watched() as writes:
        writes.is_full = True
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["f"]
