"""The server's end of a slotted stream: its credit, its slots, its heartbeats and its ends."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import pytest

from tests.loop_clock import settle
from tokenloom.request.errors import Aborted, FailedPrecondition, InvalidArgument
from tokenloom.services.runtime.peers.hello import HEARTBEAT_SECONDS, NO_CREDIT_SECONDS, make_hello
from tokenloom.services.runtime.streams import slotted_stream as server_stream
from tokenloom.services.runtime.streams.slotted_stream import Credit, ServerStream, receive_hello
from tokenloom.v1.engine_pb2 import EngineFrame, EngineInput

OURS = make_hello("server", 7)


class Stream(ServerStream[EngineInput, EngineFrame]):
    """Answers each slot that ``abort_slots`` name with one frame, when the test asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.waiting = deque[int]()

    @property
    def has_data(self) -> bool:
        return bool(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.live and not self.waiting

    def answer(self, slot: int) -> None:
        self.live.remove(slot)
        self.waiting.append(slot)
        self._changed.set()

    async def _receive(self, message: EngineInput) -> None:
        for slot in message.abort_slots:
            self._take_slot(slot)
            self.live.add(slot)

    def _next_frame(self) -> EngineFrame | None:
        return EngineFrame(slot=[self.waiting.popleft()]) if self.waiting and self._credit.take() else None

    def _beat(self) -> EngineFrame:
        return EngineFrame(step=99)


class Served:
    """A stream that is served, from its client's side."""

    def __init__(self, credit: int = 8) -> None:
        self.stream = Stream()
        self.inputs: asyncio.Queue[EngineInput | None] = asyncio.Queue()
        self.frames: list[EngineFrame] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        first = EngineInput(hello=make_hello("client", 1, initial_credit=credit))
        hello = EngineFrame(hello=OURS)
        self.ended = asyncio.create_task(self.stream.serve(first, self._messages(), self._write, hello))

    async def _write(self, frame: EngineFrame) -> None:
        await self.may_write.wait()
        self.frames.append(frame)

    async def _messages(self) -> AsyncIterator[EngineInput]:
        while (message := await self.inputs.get()) is not None:
            yield message

    async def send(self, message: EngineInput | None) -> None:
        self.inputs.put_nowait(message)
        await settle()

    @property
    def answered(self) -> list[int]:
        return [slot for frame in self.frames for slot in frame.slot]


async def test_it_ends_when_the_client_has_closed_its_side_and_all_is_answered() -> None:
    served = Served()
    await served.send(EngineInput(abort_slots=[1, 2]))
    assert served.frames[0].hello == OURS
    served.stream.answer(2)
    await served.send(None)
    assert not served.ended.done()
    served.stream.answer(1)
    await served.ended
    assert served.answered == [2, 1]


async def test_frames_wait_for_credit_and_an_end_does_not() -> None:
    served = Served(credit=1)
    await served.send(EngineInput(abort_slots=[1, 2, 3]))
    for slot in (1, 2, 3):
        served.stream.answer(slot)
    await settle()
    assert served.answered == [1]
    await served.send(EngineInput(credit=1))
    assert served.answered == [1, 2]
    served.stream.close(Aborted("closing"))
    with pytest.raises(Aborted, match="closing"):
        await served.ended
    assert served.answered == [1, 2]


async def test_a_close_sends_what_credit_allows_and_an_abort_nothing() -> None:
    for ends in (Stream.close, Stream.abort):
        served = Served()
        await served.send(EngineInput(abort_slots=[1]))
        served.stream.answer(1)
        ends(served.stream, Aborted("closing"))
        with pytest.raises(Aborted):
            await served.ended
        assert served.answered == ([1] if ends is Stream.close else [])


async def test_waiting_until_it_is_idle() -> None:
    served = Served()
    await served.send(EngineInput(abort_slots=[1]))
    waiting = asyncio.create_task(served.stream.wait_idle())
    await settle()
    assert not waiting.done()
    served.stream.answer(1)
    await waiting
    await served.send(EngineInput(abort_slots=[2]))
    waiting = asyncio.create_task(served.stream.wait_idle())
    await settle()
    served.ended.cancel()
    await waiting


@pytest.mark.parametrize("slots", [[0], [2, 1], [3, 3]])
async def test_slots_only_grow(slots: list[int]) -> None:
    served = Served()
    await served.send(EngineInput(abort_slots=slots))
    with pytest.raises(InvalidArgument, match="slots must increase"):
        await served.ended


@pytest.mark.parametrize("message", [EngineInput(abort_slots=[0]), EngineInput(hello=OURS)])
async def test_nothing_ends_the_stream_while_its_hello_is_written(message: EngineInput) -> None:
    """gRPC could send no status behind a hello whose write was cancelled."""
    served = Served()
    served.may_write.clear()
    await served.send(message)
    assert not served.ended.done()
    served.may_write.set()
    with pytest.raises((FailedPrecondition, InvalidArgument)):
        await served.ended
    assert [frame.hello for frame in served.frames] == [OURS]


async def test_only_the_first_message_carries_a_hello() -> None:
    served = Served()
    await served.send(EngineInput(hello=OURS))
    with pytest.raises(FailedPrecondition, match="only the first"):
        await served.ended


async def test_a_live_request_without_data_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "HEARTBEAT_SECONDS", 0.001)
    served = Served(credit=0)
    await asyncio.sleep(0.01)
    assert len(served.frames) == 1, "nothing is live"
    await served.send(EngineInput(abort_slots=[1]))
    while len(served.frames) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert {frame.step for frame in served.frames[1:]} == {99}
    served.ended.cancel()


async def test_the_hello_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def messages(*given: EngineInput) -> AsyncIterator[EngineInput]:
        for each in given:
            yield each

    first = EngineInput(hello=make_hello("client", 1, expected_peer_id="server"))
    assert await receive_hello(messages(first), OURS) is first
    for wrong, match in (
        ([], "none arrived"),
        ([EngineInput()], "must carry one"),
        ([EngineInput(hello=make_hello("client", 1, expected_peer_id="other"))], "other"),
    ):
        with pytest.raises(FailedPrecondition, match=match):
            await receive_hello(messages(*wrong), OURS)


async def test_takes_what_was_granted() -> None:
    credit = Credit(1)
    assert [credit.take(), credit.take()] == [True, False]
    credit.grant(2)
    assert credit.left == 2
    assert [credit.take() for _ in range(3)] == [True, True, False]


def test_credit_is_withheld_only_by_a_peer_that_grants_nothing() -> None:
    now = 100.0
    credit = Credit(read=lambda: now)

    def looks(*, wanted: bool, grants: int) -> list[bool]:
        nonlocal now
        seen = []
        for _ in range(30):
            now += HEARTBEAT_SECONDS
            if grants:
                credit.grant(grants)
                while credit.take():
                    pass
            seen.append(credit.is_withheld(wanted=wanted))
        return seen

    assert not any(looks(wanted=False, grants=0))
    assert not any(looks(wanted=True, grants=1)), "a slow peer is not a lost one"
    assert looks(wanted=True, grants=0).index(True) == round(NO_CREDIT_SECONDS / HEARTBEAT_SECONDS) - 1
