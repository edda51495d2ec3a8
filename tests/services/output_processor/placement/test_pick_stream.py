"""Tests that answers reach their picks on a shared stream, and that no pick waits for a coordinator that ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.loop_clock import pass_time, settle
from tests.services.output_processor.fakes import SOON, FakeCoordinator, serve_coordinator
from tokenloom.request import errors
from tokenloom.services.output_processor.placement.pick_stream import ANSWER_SECONDS, PickStream
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.coordinator_pb2 import EngineIdentity, PickRequest, PickResult
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.types_pb2 import EngineRole

BOTH = EngineRole.ENGINE_ROLE_BOTH


def coordinator(name: str = "a") -> FakeCoordinator:
    return FakeCoordinator([EngineIdentity(engine_id=name, epoch=1)], [BOTH])


@asynccontextmanager
async def opened(socket_dir: Path) -> AsyncIterator[PickStream]:
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    async with open_channel(f"unix:{socket_dir}/c") as channel:
        picks = PickStream(CoordinatorStub(channel))
        tasks.spawn(picks.run(), name="picks")
        try:
            yield picks
        finally:
            await tasks.close()
    assert not failures


async def until(picks: PickStream, *, is_open: bool) -> None:
    for _ in range(int(SOON / 0.005)):
        if picks.is_open == is_open:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the stream did not open or end")


async def test_answers_come_in_the_order_of_the_picks(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        requests = [PickRequest(role=BOTH, prompt_tokens=n) for n in range(1, 6)]
        answers = await asyncio.gather(*map(picks.pick, requests))
    assert [request.prompt_tokens for request in fake.requests] == [1, 2, 3, 4, 5]
    assert [answer.pick.number for answer in answers] == [1, 2, 3, 4, 5]


async def test_a_pick_that_was_given_up_does_not_take_the_next_answer(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        fake.hold.clear()
        first = asyncio.ensure_future(picks.pick(PickRequest(role=BOTH, prompt_tokens=1)))
        await fake.next_pick()
        first.cancel()
        second = asyncio.ensure_future(picks.pick(PickRequest(role=BOTH, prompt_tokens=2)))
        fake.hold.set()
        assert (await asyncio.wait_for(second, SOON)).pick.number == 2
    assert first.cancelled()


async def test_an_error_is_one_pick_s(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        fake.error = errors.ResourceExhausted("every engine is full")
        with pytest.raises(errors.ResourceExhausted, match="every engine is full"):
            await picks.pick(PickRequest(role=BOTH))
        fake.error = None
        assert (await picks.pick(PickRequest(role=BOTH))).engine.engine_id == "a"


async def test_picks_fail_when_the_coordinator_goes_and_are_taken_when_it_returns(socket_dir: Path) -> None:
    fake = coordinator()
    async with opened(socket_dir) as picks:
        async with serve_coordinator(socket_dir / "c", fake):
            await until(picks, is_open=True)
            fake.hold.clear()
            lost = asyncio.ensure_future(picks.pick(PickRequest(role=BOTH)))
            await fake.next_pick()
        with pytest.raises(errors.Unavailable):
            await asyncio.wait_for(lost, SOON)
        await until(picks, is_open=False)
        async with serve_coordinator(socket_dir / "c", coordinator("b")):
            await until(picks, is_open=True)
            assert (await picks.pick(PickRequest(role=BOTH))).engine.engine_id == "b"


async def test_the_end_of_this_process_is_no_lack_of_the_coordinator(socket_dir: Path) -> None:
    async with serve_coordinator(socket_dir / "c", coordinator()), opened(socket_dir) as picks:
        await until(picks, is_open=True)
    assert not picks._fall_backs.counts


async def test_only_the_first_request_waits_for_a_coordinator_that_does_not_answer(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        fake.hold.clear()
        first = asyncio.ensure_future(picks.pick(PickRequest(role=BOTH, prompt_tokens=1)))
        await fake.next_pick()
        pass_time(ANSWER_SECONDS / 2)
        second = asyncio.ensure_future(picks.pick(PickRequest(role=BOTH, prompt_tokens=2)))
        await settle()
        assert not first.done()
        pass_time(ANSWER_SECONDS / 2)
        with pytest.raises(errors.Unavailable):
            await asyncio.wait_for(first, SOON)
        assert isinstance(second.exception(), errors.Unavailable), "it does not wait for a second of its own"
        assert (picks.is_open, picks.is_away) == (False, True)
        fake.hold.set()
        await until(picks, is_open=True)
        assert not picks.is_away
        third = picks.pick(PickRequest(role=BOTH, prompt_tokens=3))
        assert (await asyncio.wait_for(third, SOON)).pick.number == 2, "the late answer was the first one's"
    assert [each.prompt_tokens for each in fake.requests] == [1, 3], "what was not sent yet is not counted anywhere"


async def test_a_pick_that_is_answered_in_time_does_not_count_for_the_next(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        await picks.pick(PickRequest(role=BOTH))
        pass_time(ANSWER_SECONDS * 0.9)
        fake.hold.clear()
        late = asyncio.ensure_future(picks.pick(PickRequest(role=BOTH)))
        pass_time(ANSWER_SECONDS * 0.9)
        await settle()
        assert picks.is_open
        fake.hold.set()
        assert (await asyncio.wait_for(late, SOON)).pick.number == 2


async def test_a_suspended_stream_opens_when_the_coordinator_answers(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        picks.suspend()
        assert (picks.is_open, picks.is_away) == (False, True)
        await until(picks, is_open=True)
        assert (await picks.pick(PickRequest(role=BOTH))).pick.number == 1


async def test_picks_that_come_before_an_answer_share_the_next_message(socket_dir: Path) -> None:
    fake = coordinator()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks, asyncio.timeout(SOON):
        await until(picks, is_open=True)
        fake.hold.clear()
        first = picks.pick(PickRequest(role=BOTH, prompt_tokens=1))
        await fake.next_pick()
        others = [picks.pick(PickRequest(role=BOTH, prompt_tokens=n)) for n in (2, 3)]
        await settle()
        assert len(fake.requests) == 1, "the coordinator gets one message at a time"
        fake.hold.set()
        assert [(await each).pick.number for each in (first, *others)] == [1, 2, 3]
    assert fake.batch_sizes == [1, 2]


async def test_a_starved_process_gives_the_coordinator_more_time(socket_dir: Path) -> None:
    fake = coordinator()
    fake.hold.clear()
    async with serve_coordinator(socket_dir / "c", fake), opened(socket_dir) as picks, asyncio.timeout(SOON):
        await until(picks, is_open=True)
        pick = picks.pick(PickRequest(role=BOTH, prompt_tokens=1))
        await fake.next_pick()
        pass_time(ANSWER_SECONDS + 2)
        await settle()
        assert picks.is_open, "the answer may only not be read yet"
        pass_time(ANSWER_SECONDS)
        with pytest.raises(errors.Unavailable):
            await pick
        assert picks.is_away
        fake.hold.set()


async def test_an_answer_that_cannot_be_ends_its_stream_only(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle_one, failures = PickStream._settle, [OverflowError("int too big to convert")]

    def fail_once(self: PickStream, result: PickResult) -> None:
        if failures:
            raise failures.pop()
        settle_one(self, result)

    monkeypatch.setattr(PickStream, "_settle", fail_once)
    async with serve_coordinator(socket_dir / "c", coordinator()), opened(socket_dir) as picks:
        await until(picks, is_open=True)
        with pytest.raises(errors.Unavailable):
            await picks.pick(PickRequest(role=BOTH, prompt_tokens=1))
        await until(picks, is_open=True)
        assert (await picks.pick(PickRequest(role=BOTH, prompt_tokens=1))).engine.engine_id == "a"


async def test_an_answer_that_was_not_asked_for_is_no_answer_to_a_pick_that_waits() -> None:
    """It took the place of a pick that was not sent yet, and the next suspension found fewer picks than it counted."""
    picks = PickStream(CoordinatorStub(open_channel("unix:/none")))
    picks.is_open = True
    waiting = picks.pick(PickRequest(role=BOTH))
    with pytest.raises(errors.Internal, match="more answers"):
        picks._settle(PickResult())
    picks.suspend()
    with pytest.raises(errors.Unavailable):
        await waiting
