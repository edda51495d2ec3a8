"""Which output is written when it arrives, and which by the task of the request."""

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.services.gateway.endpoints.generation_endpoint import (
    LOOK_SECONDS,
    AnswerShaper,
    AnswerStream,
    SilentStreams,
)
from tokenloom.services.gateway.generation.running_generation import RunningGeneration
from tokenloom.services.gateway.http.client_flow import Headers, TurnShare
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.mesh.collector import Collector, Delta
from tokenloom.v1.output_processor_pb2 import RequestFinished
from tokenloom.v1.types_pb2 import FINISH_REASON_STOP


class FakeGeneration:
    """Takes output from a collector, and counts it."""

    def __init__(self) -> None:
        self.collector = Collector(1)
        self.take = self.collector.take
        self.counted = ""

    @property
    def done(self) -> bool:
        return self.collector.done

    def count(self, delta: Delta) -> None:
        self.counted += delta.text


class FakeAnswer:
    """Writes texts as they are; those of "!" fail."""

    def first_events(self) -> bytes:
        return b"[first]"

    def events(self, delta: Delta) -> bytes:
        if delta.text == "!":
            raise RuntimeError("a bug")
        return delta.text.encode()

    def last_events(self) -> bytes:
        return b"[last]"

    def keep_alive(self) -> bytes:
        return b"[alive]"

    def is_large(self, delta: Delta) -> bool:
        return False

    def shape(self, delta: Delta) -> Iterator[int]:
        raise NotImplementedError


class FakeResponse:
    """The connection of a fake exchange."""

    def __init__(self, exchange: "FakeExchange") -> None:
        self.is_open = True
        self.write = exchange.write_now


class FakeExchange:
    """Keeps what is written, and whether it was written past the task."""

    def __init__(self) -> None:
        self.started = False
        self.can_begin = True
        self.written: list[tuple[str, bytes]] = []
        self.response = FakeResponse(self)

    def begin(self, headers: Headers, body: bytes) -> None:
        self.started = True
        self.written.append(("begin", body))

    def write_now(self, body: bytes) -> None:
        self.written.append(("now", body))

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.written.append(("start", b""))

    async def write(self, body: bytes) -> None:
        self.written.append(("write", body))

    async def finish(self, body: bytes) -> None:
        self.written.append(("finish", body))


class Streamed:
    """An answer that is streamed by a task of its own."""

    def __init__(self, turns: TurnShare | None = None, head_after: float = 0.0) -> None:
        self.generation, self.exchange = FakeGeneration(), FakeExchange()
        stream = AnswerStream(
            cast(HttpExchange, self.exchange),
            cast(RunningGeneration, self.generation),
            cast(AnswerShaper, FakeAnswer()),
            turns or TurnShare(8),
            lambda: (),
            SilentStreams(head_after),
        )
        self.task = asyncio.create_task(stream.run(None))

    def put(self, text: str) -> None:
        collector = self.generation.collector
        collector.put(0, text, collector.num_tokens(0), [7])

    async def end(self) -> None:
        collector = self.generation.collector
        collector.finish(0, RequestFinished(reason=FINISH_REASON_STOP, completion_tokens=collector.num_tokens(0)))
        await self.task


async def test_the_first_output_is_written_with_the_head_as_soon_as_it_arrives() -> None:
    streamed = Streamed()
    await asyncio.sleep(0)
    streamed.put("a")
    streamed.put("b")
    assert streamed.exchange.written == [("begin", b"[first]a"), ("now", b"b")]
    await streamed.end()
    assert streamed.exchange.written[2:] == [("finish", b"[last]")]
    assert streamed.generation.counted == "ab"


async def test_a_connection_that_cannot_take_it_is_left_to_the_task() -> None:
    streamed = Streamed()
    streamed.exchange.can_begin = False
    await asyncio.sleep(0)
    streamed.put("a")
    assert streamed.exchange.written == []
    await streamed.end()
    assert streamed.exchange.written == [("start", b""), ("finish", b"[first]a[last]")]


async def test_only_so_many_answers_begin_in_one_turn() -> None:
    turns = TurnShare(2)
    answers = [Streamed(turns) for _ in range(5)]
    await asyncio.sleep(0)
    for streamed in answers:
        streamed.put("a")
    assert [bool(streamed.exchange.written) for streamed in answers] == [True, True, False, False, False]
    for streamed in answers:
        await streamed.end()
    assert all(streamed.exchange.written[-1][1].endswith(b"[last]") for streamed in answers)


async def test_a_bug_in_the_first_output_begins_no_response() -> None:
    streamed = Streamed()
    await asyncio.sleep(0)
    streamed.put("!")
    with pytest.raises(Exception, match="internal error"):
        await streamed.task
    assert streamed.exchange.written == []


async def look(times: int) -> None:
    """Let so many seconds pass, in each of which the live streams are looked at."""
    for _ in range(times):
        pass_time(LOOK_SECONDS)
        await settle()


async def test_a_silent_stream_gets_its_head_and_then_something_to_skip() -> None:
    streamed = Streamed(head_after=5.0)
    await settle()
    await look(4)
    assert streamed.exchange.written == []
    await look(1)
    assert streamed.exchange.written == [("begin", b"[alive]")]
    await look(9)
    assert len(streamed.exchange.written) == 1
    await look(1)
    assert streamed.exchange.written[1:] == [("now", b"[alive]")]
    streamed.put("a")
    streamed.put("b")
    assert streamed.exchange.written[2:] == [("now", b"[first]a"), ("now", b"b")]
    await look(10)
    assert len(streamed.exchange.written) == 4, "the silence begins with the last output"
    await look(1)
    assert streamed.exchange.written[4:] == [("now", b"[alive]")]
    await streamed.end()
    assert streamed.exchange.written[5:] == [("finish", b"[last]")]


async def test_a_silent_stream_that_ends_without_output_has_its_first_events() -> None:
    streamed = Streamed(head_after=2.0)
    await settle()
    await look(2)
    await streamed.end()
    assert streamed.exchange.written == [("begin", b"[alive]"), ("finish", b"[first][last]")]


async def test_only_so_many_silent_streams_are_written_to_in_one_turn() -> None:
    turns = TurnShare(2)
    answers = [Streamed(turns, head_after=1.0) for _ in range(5)]
    await settle()
    pass_time(LOOK_SECONDS)
    for _ in range(3):
        await asyncio.sleep(0)
        if any(streamed.exchange.written for streamed in answers):
            break
    assert sum(bool(streamed.exchange.written) for streamed in answers) == 2
    await settle()
    assert all(streamed.exchange.written == [("begin", b"[alive]")] for streamed in answers)
    for streamed in answers:
        await streamed.end()


async def test_a_client_that_does_not_read_is_sent_nothing_to_skip() -> None:
    streamed = Streamed(head_after=1.0)
    await settle()
    await look(1)
    streamed.exchange.response.is_open = False
    await look(30)
    assert streamed.exchange.written == [("begin", b"[alive]")]
    await streamed.end()
