"""Results are appended once, in whole lines, and survive what they must."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from tests.loop_clock import settle
from tokenloom.services.gateway.batches import results as results_module
from tokenloom.services.gateway.batches.batch_lines import LineError, LineRequest, answer_line, error_line
from tokenloom.services.gateway.batches.results import SYNC_SECONDS, Results
from tokenloom.services.gateway.files.disk import Disk


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    disk = Disk(tmp_path)
    await disk.open()
    yield disk
    await disk.close()


def answer(number: int) -> bytes:
    return answer_line("batch_1", LineRequest(number, str(number), b"{}"), 200, "r", b"{}")


async def test_each_line_has_one_result(disk: Disk, tmp_path: Path) -> None:
    paths = tmp_path / "out", tmp_path / "err"
    results = Results(disk, *paths)
    await results.open(100)
    await asyncio.gather(*(results.add(number, answer(number), is_error=False) for number in range(1, 91)))
    await asyncio.gather(*(results.add(number, answer(number), is_error=False) for number in range(80, 91)))
    await results.add(91, error_line("batch_1", LineError(91, "", "c", "m")), is_error=True)
    await results.close()
    assert (results.num_outputs, results.num_errors) == (90, 1)
    assert results.num_bytes == sum(path.stat().st_size for path in paths)
    again = Results(disk, *paths)
    await again.open(100)
    assert [number for number in range(101) if again.done[number]] == list(range(1, 92))
    assert (again.num_outputs, again.num_errors, again.num_bytes) == (90, 1, results.num_bytes)
    await again.close()


async def test_a_full_disk_leaves_whole_lines(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(disk, tmp_path / "out", tmp_path / "err")
    await results.open(10)
    await results.add(1, answer(1), is_error=False)

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(results_module, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            await results.add(2, answer(2), is_error=False)
    await results.add(3, answer(3), is_error=False)
    await results.close()
    assert (tmp_path / "out").read_bytes() == answer(1) + answer(3)


async def test_what_fails_in_one_file_is_taken_back_in_the_other(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(disk, tmp_path / "out", tmp_path / "err")
    await results.open(10)
    real = results_module.write_all

    def full(descriptor: int, data: bytes) -> None:
        if b"wrong" in data:
            raise OSError(28, "No space left on device")
        real(descriptor, data)

    wrong = error_line("batch_1", LineError(2, "", "wrong", "m"))
    with monkeypatch.context() as patch:
        patch.setattr(results_module, "write_all", full)
        adding = (results.add(1, answer(1), is_error=False), results.add(2, wrong, is_error=True))
        failures = await asyncio.gather(*adding, return_exceptions=True)
        assert all(isinstance(failure, OSError) for failure in failures)
    assert (tmp_path / "out").read_bytes() == b""
    await asyncio.gather(results.add(1, answer(1), is_error=False), results.add(2, wrong, is_error=True))
    await results.close()
    assert (results.num_outputs, results.num_errors) == (1, 1)
    assert ((tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()) == (answer(1), wrong)


async def test_half_a_line_that_cannot_be_dropped_at_once_is_dropped_before_the_next(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(disk, tmp_path / "out", tmp_path / "err")
    await results.open(10)
    await results.add(1, answer(1), is_error=False)

    def fails(descriptor: int, data: object) -> None:
        if isinstance(data, bytes):
            os.write(descriptor, data[:5])
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(results_module, "write_all", fails)
        patch.setattr(os, "ftruncate", fails)
        for number in (2, 3):
            with pytest.raises(OSError, match="Input/output error"):
                await results.add(number, answer(number), is_error=False)
    await results.add(2, answer(2), is_error=False)
    assert (tmp_path / "out").read_bytes() == answer(1) + answer(2)
    with monkeypatch.context() as patch:
        patch.setattr(results_module, "write_all", fails)
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(OSError, match="Input/output error"):
            await results.add(3, answer(3), is_error=False)
    await results.close()
    assert (tmp_path / "out").read_bytes() == answer(1) + answer(2)


async def test_a_line_whose_sync_fails_is_not_there_twice(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    results = Results(disk, tmp_path / "out", tmp_path / "err", lambda: now)
    await results.open(10)
    now = SYNC_SECONDS

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output error"):
            await results.add(1, answer(1), is_error=False)
    await results.add(1, answer(1), is_error=False)
    await results.close()
    assert (tmp_path / "out").read_bytes() == answer(1)
    assert results.num_outputs == 1


async def test_results_that_cannot_be_opened_can_be_closed(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(disk, tmp_path / "out", tmp_path / "err")

    def fails(descriptor: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", fails)
    with pytest.raises(OSError, match="Input/output error"):
        await results.open(10)
    await results.close()
    assert not results._files


class SlowDisk(Executor):
    """Runs each call at once, except those that it holds back until :meth:`go_on`."""

    def __init__(self) -> None:
        self.is_slow = False
        self._held: list[Callable[[], None]] = []

    def submit(self, call: Callable[[], Any], /, *_: Any, **__: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        if self.is_slow:
            self.is_slow = False
            self._held.append(run)
        else:
            run()
        return future

    def go_on(self) -> None:
        while self._held:
            self._held.pop(0)()


async def test_a_write_ends_before_its_files_are_closed(tmp_path: Path) -> None:
    """A disk may be slower than a gateway that ends, which cancels the batch once more after a second."""
    threads = SlowDisk()
    results = Results(Disk(tmp_path, threads), tmp_path / "out", tmp_path / "err")
    await results.open(10)
    threads.is_slow = True
    adding = asyncio.create_task(results.add(1, answer(1), is_error=False))
    await settle()
    closing = asyncio.create_task(results.close())
    await settle()
    closing.cancel()
    await settle()
    threads.go_on()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await adding
    assert (tmp_path / "out").read_bytes() == answer(1)


async def test_an_error_of_any_kind_ends_the_wait(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(disk, tmp_path / "out", tmp_path / "err")
    await results.open(10)

    def fails(descriptor: int, data: bytes) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(results_module, "write_all", fails)
        with pytest.raises(MemoryError):
            await asyncio.wait_for(results.add(1, answer(1), is_error=False), 30)
    await results.close()


async def test_the_disk_is_synced_now_and_then(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    now = 0.0
    results = Results(disk, tmp_path / "out", tmp_path / "err", lambda: now)
    await results.open(10)
    for number in range(1, 6):
        await results.add(number, answer(number), is_error=False)
    assert not syncs
    now = SYNC_SECONDS
    await results.add(6, answer(6), is_error=False)
    assert len(syncs) == 2
    await results.close()
    assert len(syncs) == 4
