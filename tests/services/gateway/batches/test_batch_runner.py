"""What becomes of batches when they are cancelled, the disk refuses, or the gateway ends, at any moment."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.batches.desk import NOW, Desk, at_once, until
from tests.services.gateway.files.failing_disk import Crashed, Writes
from tokenloom.request.errors import FailedPrecondition, Unavailable
from tokenloom.services.gateway.batches import batch_store
from tokenloom.services.gateway.batches.batch import StoredBatch
from tokenloom.services.gateway.batches.batch_lines import LineRequest, error_line, expiry_of
from tokenloom.services.gateway.batches.batch_task import LONGEST_RETRY_SECONDS
from tokenloom.services.gateway.files.file_store import StoredFile
from tokenloom.services.gateway.http.internal_call import InternalResponse

GOOD = [b'{"custom_id":"c%d","url":"/v1/completions","body":{}}' % number for number in range(3)]
BAD = b'{"custom_id":"bad","url":"/v1/elsewhere","body":{}}'


async def never(body: bytes) -> InternalResponse:
    await asyncio.Event().wait()
    raise AssertionError


def after(count: int) -> Callable[[bytes], Awaitable[InternalResponse]]:
    """Return what answers so many lines, and no further one."""
    left = count

    async def answer(body: bytes) -> InternalResponse:
        nonlocal left
        left -= 1
        return await (at_once(body) if left >= 0 else never(body))

    return answer


@pytest.mark.parametrize("turns", range(45))
async def test_a_batch_that_is_cancelled_at_any_turn_ends(tmp_path: Path, turns: int) -> None:
    async with Desk(tmp_path).open() as desk:
        batch = await desk.create(await desk.upload(*GOOD, BAD))
        await settle(turns)
        await desk.runner.cancel(batch)
        assert batch.status in ("cancelling", "cancelled", "completed")
        await desk.ended(batch)
        assert not batch.problems
        assert ("cancelling" in batch.times) == (batch.status == "cancelled")
        desk.check()


async def test_many_clients_cancel_one_batch(tmp_path: Path) -> None:
    async with Desk(tmp_path).open() as desk:
        desk.calls.answer = after(2)
        batch = await desk.create(await desk.upload(*GOOD))
        await until(lambda: batch.completed == 2)
        await asyncio.gather(*(desk.runner.cancel(batch) for _ in range(20)))
        await desk.ended(batch)
        assert (batch.status, batch.completed) == ("cancelled", 2)
        await desk.runner.cancel(batch)
        desk.check()


async def test_a_batch_that_waits_for_its_turn_is_cancelled_at_once(tmp_path: Path) -> None:
    async with Desk(tmp_path, concurrency=1).open() as desk:
        desk.calls.answer = never
        file = await desk.upload(*GOOD)
        first, second = await desk.create(file), await desk.create(file)
        await desk.runner.cancel(second)
        await desk.ended(second)
        assert (first.is_ended, second.status) == (False, "cancelled")
        await desk.runner.cancel(first)
        await desk.ended(first)
        desk.check()


async def test_a_full_disk_refuses_a_new_batch_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    with Writes().watched() as writes:
        async with Desk(tmp_path).open() as desk:
            file = await desk.upload(*GOOD)
            writes.is_full = True
            with pytest.raises(Unavailable, match="No space left on device; retry later"):
                await desk.create(file)
            writes.is_full = False
            desk.check()
            await desk.files.delete(file.id, "")
            desk.check()


@pytest.mark.parametrize("answered", [0, 3])
async def test_a_batch_ends_when_a_full_disk_has_room_again(
    tmp_path: Path, answered: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Full before the first line, or behind the last one: the batch waits for the disk, as long as that takes."""
    with Writes().watched() as writes:
        async with Desk(tmp_path).open() as desk:
            going_on = asyncio.Event()

            async def answer(body: bytes) -> InternalResponse:
                await going_on.wait()
                return await at_once(body)

            desk.calls.answer = answer
            file = await desk.upload(*GOOD)
            if not answered:
                creating = desk.batches.add(batch := desk.batch(file), lambda: desk.runner.submit(batch))
                await creating
                writes.is_full = True
            else:
                batch = await desk.create(file)
                await until(lambda: batch.status == "in_progress")
            going_on.set()
            if answered:
                await until(lambda: batch.completed == 3)
                writes.is_full = True
            for _ in range(5):
                await settle(50)
                pass_time(LONGEST_RETRY_SECONDS + 1)
            assert not batch.is_ended
            waits = [record for record in caplog.records if "is tried again: " in record.message]
            assert len(waits) == 1, "each reason is logged once"
            writes.is_full = False
            pass_time(LONGEST_RETRY_SECONDS + 1)
            await desk.ended(batch)
            assert (batch.status, batch.completed) == ("completed", 3)
            await desk.files.delete(file.id, "")
            desk.check()


async def test_a_batch_whose_results_cannot_be_written_fails_with_those_it_has(tmp_path: Path) -> None:
    with Writes().watched() as writes:
        async with Desk(tmp_path, concurrency=1).open() as desk:
            answers = 0

            async def answer(body: bytes) -> InternalResponse:
                nonlocal answers
                answers += 1
                writes.is_full = answers == 2
                return await at_once(body)

            desk.calls.answer = answer
            batch = await desk.create(await desk.upload(*GOOD))
            await settle(100)
            assert not batch.is_ended
            writes.is_full = False
            pass_time(LONGEST_RETRY_SECONDS)
            await desk.ended(batch)
            assert (batch.status, batch.completed, batch.problems[0].code) == ("failed", 1, "storage")
            desk.check()


async def test_a_cancel_that_cannot_be_written_is_an_error_and_takes_effect_later(tmp_path: Path) -> None:
    with Writes().watched() as writes:
        async with Desk(tmp_path).open() as desk:
            desk.calls.answer = after(1)
            batch = await desk.create(await desk.upload(*GOOD))
            await until(lambda: batch.completed == 1)
            writes.is_broken = True
            for _ in range(2):
                with pytest.raises(Unavailable, match="cannot be stored now: Input/output error"):
                    await desk.runner.cancel(batch)
            writes.is_broken = False
            writes.is_full = True
            pass_time(LONGEST_RETRY_SECONDS)
            await until(lambda: batch.status == "cancelling")
            await desk.runner.cancel(batch)
            writes.is_full = False
            pass_time(LONGEST_RETRY_SECONDS)
            await desk.ended(batch)
            assert (batch.status, batch.completed) == ("cancelled", 1)
            desk.check()


@pytest.mark.parametrize("moment", ["before the first line", "while it runs", "behind the last line"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_on_a_full_disk_a_batch_is_cancelled_and_its_input_deleted_for_good(
    tmp_path: Path, moment: str, restarts: bool
) -> None:
    """Nothing but these two could make room, and the cancelled batch completed after a restart."""
    with Writes().watched() as writes:
        async with Desk(tmp_path).open() as desk:
            going_on = asyncio.Event()

            async def answer(body: bytes) -> InternalResponse:
                await going_on.wait()
                return await at_once(body)

            desk.calls.answer = answer
            file = await desk.upload(*GOOD)
            if moment == "before the first line":
                batch = desk.batch(file)
                await desk.batches.add(batch, lambda: desk.runner.submit(batch))
                writes.is_full = True
                await settle(20)
            else:
                batch = await desk.create(file)
                await until(lambda: batch.status == "in_progress")
            if moment == "behind the last line":
                going_on.set()
                await until(lambda: batch.completed == 3)
            writes.is_full = True
            await settle(20)
            await desk.runner.cancel(batch)
            assert batch.status == "cancelling"
            await settle(20)
            if moment != "behind the last line":
                await desk.files.delete(file.id, "")
            if not restarts:
                writes.is_full = False
                pass_time(LONGEST_RETRY_SECONDS)
                await desk.ended(batch)
                desk.check()
        writes.is_full = False
        async with Desk(tmp_path).open() as desk:
            (found,) = desk.batches.of("")
            await desk.ended(found)
            assert (found.id, found.status) == (batch.id, "cancelled")
            assert found.completed == (3 if moment == "behind the last line" else 0)
            assert not found.problems
            desk.check()


@pytest.mark.parametrize("steps", range(3))
async def test_a_crash_behind_the_mark_of_a_cancelled_batch_leaves_it_cancelled(tmp_path: Path, steps: int) -> None:
    """Behind the mark, behind the whole description, behind the removal of the mark."""
    async with Desk(tmp_path).open() as desk:
        desk.calls.answer = never
        batch = await desk.create(await desk.upload(*GOOD))
        await until(lambda: batch.status == "in_progress")
    (path,) = (tmp_path / "batches").glob("*.json")
    mark = path.with_suffix(".stop")
    path.rename(mark)
    if steps:
        stored = msgspec.json.decode(mark.read_bytes(), type=StoredBatch)
        stored.begin("cancelling", NOW)
        path.write_bytes(msgspec.json.encode(stored))
    if steps == 2:
        mark.unlink()
    async with Desk(tmp_path).open() as desk:
        (found,) = desk.batches.of("")
        await desk.ended(found)
        assert (found.status, found.completed) == ("cancelled", 0)
        desk.check()


async def test_two_batches_displace_two_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_KEPT", 3)
    async with Desk(tmp_path).open() as desk:
        file = await desk.upload(*GOOD)
        old = [await desk.ended(await desk.create(file)) for _ in range(3)]
        new = await asyncio.gather(*(desk.create(file) for _ in range(2)))
        for batch in new:
            await desk.ended(batch)
        assert desk.batches.of("") == [old[2], *new]
        desk.check()


async def test_batches_that_are_created_at_once_stay_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_OPEN", 2)
    async with Desk(tmp_path).open() as desk:
        desk.calls.answer = never
        file = await desk.upload(*GOOD)
        outcomes = await asyncio.gather(*(desk.create(file) for _ in range(4)), return_exceptions=True)
        made = [outcome for outcome in outcomes if isinstance(outcome, StoredBatch)]
        assert desk.batches.of("") == made
        assert len(made) == 2
        assert sum(isinstance(outcome, FailedPrecondition) for outcome in outcomes) == 2
        for batch in made:
            await desk.runner.cancel(batch)
            await desk.ended(batch)
        await desk.create(file)


@pytest.mark.parametrize("turns", range(8))
async def test_a_batch_whose_creation_was_cancelled_runs_or_is_not_there(tmp_path: Path, turns: int) -> None:
    async with Desk(tmp_path).open() as desk:
        file = await desk.upload(*GOOD)
        creating = asyncio.create_task(desk.create(file))
        await settle(turns)
        creating.cancel()
        await asyncio.wait([creating])
        for batch in desk.batches.of(""):
            await desk.ended(batch)
            assert batch.status == "completed"
        await desk.files.delete(file.id, "")
        desk.check()


async def test_the_input_of_a_batch_that_is_being_created_stays(tmp_path: Path) -> None:
    async with Desk(tmp_path).open() as desk:
        file = await desk.upload(*GOOD)
        batch, refusal = await asyncio.gather(desk.create(file), desk.files.delete(file.id, ""), return_exceptions=True)
        assert isinstance(refusal, FailedPrecondition)
        assert isinstance(batch, StoredBatch)
        await desk.ended(batch)
        assert batch.status == "completed"
        desk.check()


async def test_batches_that_run_at_once_share_the_bytes_of_their_tenant(tmp_path: Path) -> None:
    async def answer(body: bytes) -> InternalResponse:
        await asyncio.sleep(0)
        return InternalResponse(200, {}, b'"%s"' % (b"x" * 500))

    async with Desk(tmp_path, tenant_bytes=8000).open() as desk:
        desk.calls.answer = answer
        file = await desk.upload(*GOOD)
        batches = await asyncio.gather(*(desk.create(file) for _ in range(6)))
        for batch in batches:
            await desk.ended(batch)
        assert desk.files.num_bytes <= 8000
        failed = [batch for batch in batches if batch.status == "failed"]
        assert failed
        assert {batch.problems[0].code for batch in failed} == {"results_too_large"}
        desk.check()


async def test_a_batch_needs_places_for_its_results(tmp_path: Path) -> None:
    async with Desk(tmp_path, tenant_files=4).open() as desk:
        desk.calls.answer = never
        file = await desk.upload(*GOOD)
        batch = await desk.create(file)
        with pytest.raises(FailedPrecondition, match="2 files are needed, and of 4 that may be stored 3"):
            await desk.create(file)
        await desk.upload(*GOOD)
        with pytest.raises(FailedPrecondition, match="4 files are stored"):
            await desk.upload(*GOOD)
        await desk.runner.cancel(batch)
        await desk.ended(batch)
        await asyncio.gather(*(desk.upload(*GOOD) for _ in range(2)))
        desk.check()


async def test_a_line_that_the_gateway_fails_to_run_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(body: bytes) -> InternalResponse:
        if b"1" in body:
            raise ValueError("a bug")
        return await at_once(body)

    async with Desk(tmp_path).open() as desk:
        desk.calls.answer = answer
        lines = [b'{"custom_id":"%d","url":"/v1/completions","body":{"n":%d}}' % (n, n) for n in range(3)]
        batch = await desk.ended(await desk.create(await desk.upload(*lines)))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
        assert b'"internal_error"' in desk.files.path(batch.error_file_id).read_bytes()
        assert "line 2 failed" in caplog.text
        desk.check()


async def test_a_batch_that_has_expired_stays_so_after_a_crash(tmp_path: Path) -> None:
    """The crash comes behind the last line's result: the results alone say what has become of them."""
    async with Desk(tmp_path).open() as desk:
        desk.calls.answer = after(1)
        batch = await desk.create(await desk.upload(*GOOD))
        await until(lambda: batch.completed == 1)
    path = tmp_path / "batches" / f"{batch.id}.errors"
    path.write_bytes(b"".join(error_line(batch.id, expiry_of(LineRequest(n, f"c{n}", b"{}"))) for n in (2, 3)))
    async with Desk(tmp_path).open() as desk:
        (batch,) = desk.batches.of("")
        await desk.ended(batch)
        assert (batch.status, batch.completed, batch.failed) == ("expired", 1, 2)
        desk.check()


class Seen:
    """What a client has seen of its batches before a crash."""

    def __init__(self) -> None:
        self.batches: list[StoredBatch] = []
        self.cancelled: set[str] = set()
        self.ended: dict[str, str] = {}
        self.input: StoredFile | None = None

    def check(self, desk: Desk, answered: dict[str, int]) -> None:
        after = {batch.id: batch for batch in desk.batches.of("")}
        for batch in self.batches:
            now = after[batch.id]
            assert now.completed >= answered[batch.id], "an answer is lost"
            if batch.id in self.cancelled:
                assert now.status == "cancelled"
            if batch.id in self.ended:
                assert now.status == self.ended[batch.id]
        desk.check()


async def two_batches(desk: Desk, seen: Seen) -> None:
    """One batch completes, another one is cancelled when it has an answer, and the input is deleted."""
    seen.input = file = await desk.upload(*GOOD, BAD)
    for cancels in (False, True):
        desk.calls.answer = after(1) if cancels else at_once
        batch = await desk.create(file)
        seen.batches.append(batch)
        if cancels:
            await until(lambda batch=batch: batch.completed == 1)  # type: ignore[misc]
            await desk.runner.cancel(batch)
            seen.cancelled.add(batch.id)
        await desk.ended(batch)
        seen.ended[batch.id] = batch.status
    await desk.files.delete(file.id, "")


async def run_and_crash(directory: Path, writes: Writes, seen: Seen) -> dict[str, int]:
    """Run until the crash; return how many answers each batch showed then."""
    shown: dict[str, int] = {}
    with writes.watched(), contextlib.suppress(Crashed):
        async with Desk(directory).open() as desk:
            client = asyncio.create_task(two_batches(desk, seen))
            await until(lambda: client.done() or writes.has_crashed)
            shown = {batch.id: batch.completed for batch in seen.batches}
            client.cancel()
            with contextlib.suppress(asyncio.CancelledError, Crashed):
                await client
    return shown


async def test_after_a_crash_at_any_write_the_next_gateway_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Writes()
    await run_and_crash(tmp_path / "whole", whole, seen := Seen())
    assert [*seen.ended.values()] == ["completed", "cancelled"]
    assert whole.count > 60
    caplog.set_level(logging.CRITICAL)  # a crash is no news here
    for step in range(whole.count):
        directory = tmp_path / str(step)
        answered = await run_and_crash(directory, Writes(crash_at=step), seen := Seen())
        async with Desk(directory).open() as desk:
            for batch in desk.batches.of(""):
                await desk.ended(batch)
            seen.check(desk, answered)
            assert all(batch.status in ("completed", "cancelled") for batch in desk.batches.of("")), step
