"""The client's end of a slotted stream: its hello, its messages, its credit, and how it ends."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc.aio
import pytest

from tests.loop_clock import settle
from tokenloom.request.errors import FailedPrecondition, Unavailable
from tokenloom.services.runtime.streams import slotted_stream as client_stream
from tokenloom.services.runtime.streams.slotted_stream import INITIAL_CREDIT, MESSAGE_BYTES, ClientStream, PeerSilent
from tokenloom.v1.engine_pb2 import EngineFrame, EngineInput
from tokenloom.v1.types_pb2 import Hello


class Stream(ClientStream[EngineInput, EngineFrame, str]):
    """Collects the numbers of steps; step 99 cannot be."""

    def __init__(self) -> None:
        super().__init__(EngineInput)
        self.steps: list[int] = []

    def receive(self, frame: EngineFrame) -> Iterable[None]:
        if frame.step == 99:
            raise OverflowError("int too big to convert")
        self.steps.append(frame.step)
        self._grant()
        return ()

    def begin(self, name: str, num_bytes: int = 0) -> int:
        slot = self._take_slot(name)
        self._message(num_bytes).abort_slots.append(slot)
        return slot


class Call:
    """A call in memory."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[EngineInput] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.was_cancelled = False

    async def write(self, message: EngineInput) -> None:
        await self.may_write.wait()
        self.written.append(message)

    async def read(self) -> Any:
        if (frame := await self.frames.get()) is None:
            raise asyncio.CancelledError
        return frame

    def cancel(self) -> None:
        self.was_cancelled = True
        self.frames.put_nowait(None)


class Served:
    """A stream that is served, and what it got for its hello."""

    def __init__(self, error: Exception | None = None) -> None:
        self.stream, self.call = Stream(), Call()
        self.hellos: list[Hello] = []
        self.error = error
        call: Any = self.call
        self.ended = asyncio.create_task(
            self.stream.serve(call, EngineInput(hello=Hello(peer_id="client")), self._on_hello, 30.0)
        )

    def _on_hello(self, frame: EngineFrame) -> None:
        self.hellos.append(frame.hello)
        if self.error is not None:
            raise self.error

    async def greeted(self) -> "Served":
        self.call.frames.put_nowait(EngineFrame(hello=Hello(peer_id="server")))
        await settle()
        return self


async def test_the_hello_comes_first_and_what_follows_is_received() -> None:
    served = await Served().greeted()
    assert [message.hello.peer_id for message in served.call.written] == ["client"]
    assert [each.peer_id for each in served.hellos] == ["server"]
    for step in (1, 2):
        served.call.frames.put_nowait(EngineFrame(step=step))
    served.call.frames.put_nowait(grpc.aio.EOF)
    error = await served.ended
    assert isinstance(error, Unavailable)
    assert "ended the stream" in error.message
    assert served.stream.steps == [1, 2]
    assert served.call.was_cancelled


async def test_a_server_that_is_not_the_expected_one_is_given_up() -> None:
    wrong = FailedPrecondition("hello: expected another")
    served = await Served(wrong).greeted()
    assert await served.ended is wrong
    assert served.call.was_cancelled


async def test_requests_share_a_message_up_to_its_bytes() -> None:
    served = await Served().greeted()
    served.call.may_write.clear()
    served.stream.begin("a")
    await settle()  # the writer waits with the first
    slots = [served.stream.begin(name, MESSAGE_BYTES // 2) for name in "bcd"]
    served.call.may_write.set()
    await settle()
    assert [list(message.abort_slots) for message in served.call.written[1:]] == [[1], slots[:2], slots[2:]]
    assert served.stream.detach() == ["a", "b", "c", "d"]
    served.ended.cancel()


async def test_credit_is_granted_for_several_frames_at_a_time() -> None:
    served = await Served().greeted()
    for step in range(INITIAL_CREDIT // 2):
        served.call.frames.put_nowait(EngineFrame(step=step))
        await settle()
    assert [message.credit for message in served.call.written[1:]] == [INITIAL_CREDIT // 4] * 2
    served.ended.cancel()


async def test_a_frame_that_cannot_be_ends_its_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    served = await Served().greeted()
    served.call.frames.put_nowait(EngineFrame(step=99))
    assert isinstance(await served.ended, Unavailable)
    assert "OverflowError" in caplog.text


async def test_a_server_that_owes_frames_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(client_stream, "SILENCE_SECONDS", 0.005)
    served = await Served().greeted()
    await asyncio.sleep(0.02)
    assert not served.ended.done(), "without requests it owes none"
    served.stream.begin("a")
    assert isinstance(await asyncio.wait_for(served.ended, 30.0), PeerSilent)


async def test_an_owner_that_cancels_the_call_ends_the_stream_and_one_that_cancels_the_task_gets_that() -> None:
    served = await Served().greeted()
    served.call.cancel()
    assert isinstance(await served.ended, Unavailable)
    served = await Served().greeted()
    served.ended.cancel()
    with pytest.raises(asyncio.CancelledError):
        await served.ended
    assert served.call.was_cancelled
