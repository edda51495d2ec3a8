"""The short way to the socket sends what ASGI's would, and stands back where it cannot."""

import asyncio
import logging
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenloom.services.gateway.http.uvicorn_protocol import DirectWriter, Watchers


class FakeTransport:
    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


class FakeConnection:
    """A connection in the middle of a POST."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.flow = FlowControl(cast(asyncio.Transport, self.transport))
        self.scope: dict[str, Any] = {"type": "http", "method": "POST"}
        self.cycle = RequestResponseCycle(
            scope=cast(Any, self.scope),
            transport=cast(asyncio.Transport, self.transport),
            flow=self.flow,
            logger=logging.getLogger(),
            access_logger=logging.getLogger(),
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )
        self.watchers: Watchers = set()
        self.writer = DirectWriter(self.cycle, self.watchers)

    async def start(self, *headers: tuple[bytes, bytes]) -> None:
        await self.cycle.send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        self.transport.sent = b""


async def test_a_piece_looks_like_one_that_was_sent() -> None:
    connection = FakeConnection()
    await connection.start()
    body = b"data: {}\n\n" * 3
    await connection.cycle.send({"type": "http.response.body", "body": body, "more_body": True})
    sent, connection.transport.sent = connection.transport.sent, b""
    connection.writer.write(body)
    assert connection.transport.sent == sent


async def test_open_only_while_nothing_stands_in_the_way() -> None:
    connection = FakeConnection()
    assert not connection.writer.is_open, "the response has not begun"
    await connection.start()
    assert connection.writer.is_open
    connection.flow.pause_writing()
    assert not connection.writer.is_open, "the client is slow"
    connection.flow.resume_writing()
    connection.cycle.disconnected = True
    assert not connection.writer.is_open, "the client left"


async def test_not_for_a_body_of_known_length() -> None:
    connection = FakeConnection()
    await connection.start((b"content-length", b"3"))
    assert not connection.writer.is_open


def test_a_body_is_taken_once_all_of_it_is_here() -> None:
    connection = FakeConnection()
    connection.cycle.body += b"abc"
    assert connection.writer.take_body() is None, "more of it is to come"
    connection.cycle.more_body = False
    assert connection.writer.take_body() == b"abc"
    assert connection.writer.take_body() == b""


def test_who_left_has_no_body() -> None:
    connection = FakeConnection()
    connection.cycle.more_body = False
    connection.cycle.disconnected = True
    assert connection.writer.take_body() is None
    assert connection.writer.cycle.disconnected


def test_who_watches_reads_on_and_is_told_until_it_does_not() -> None:
    connection = FakeConnection()
    connection.flow.pause_reading()
    lost: list[str] = []

    def on_lost() -> None:
        lost.append("lost")

    connection.writer.watch(on_lost)
    assert not connection.flow.read_paused
    for told in connection.watchers:
        told()
    assert lost == ["lost"]
    connection.writer.unwatch(on_lost)
    assert not connection.watchers
