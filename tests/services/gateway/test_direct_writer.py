"""The short way to the socket sends what ASGI's would, and stands back where it cannot."""

import asyncio
import logging
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenloom.services.gateway import direct_writer


class FakeTransport:
    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False


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
        direct_writer.offer(self.scope, self.cycle)
        writer = direct_writer.find(self.scope)
        assert writer is not None
        self.writer = writer

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


@pytest.mark.parametrize("scope", [{}, {"extensions": {}}])
def test_another_server_has_none(scope: dict[str, Any]) -> None:
    assert direct_writer.find(scope) is None
