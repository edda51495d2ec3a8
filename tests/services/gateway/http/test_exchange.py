"""Bodies, writing past ASGI, and clients that leave, with the direct writer and with plain ASGI."""

import asyncio
import logging
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenloom.services.gateway.http.exchange import (
    DIRECT_WRITER,
    ClientDisconnected,
    DirectWriter,
    Exchange,
    Watchers,
)


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


async def test_open_only_while_the_client_reads_a_chunked_response() -> None:
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


def test_a_body_is_taken_once_it_is_complete() -> None:
    connection = FakeConnection()
    connection.cycle.body += b"abc"
    assert connection.writer.take_body() is None, "more of it is to come"
    connection.cycle.more_body = False
    assert connection.writer.take_body() == b"abc"
    assert connection.writer.take_body() == b""


def test_a_client_that_left_has_no_body() -> None:
    connection = FakeConnection()
    connection.cycle.more_body = False
    connection.cycle.disconnected = True
    assert connection.writer.take_body() is None
    assert connection.writer.cycle.disconnected


def test_a_watcher_is_called_when_the_client_leaves() -> None:
    connection = FakeConnection()
    connection.flow.pause_reading()
    lost: list[str] = []

    def on_lost() -> None:
        lost.append("lost")

    stop = connection.writer.watch(on_lost)
    assert not connection.flow.read_paused
    for watcher in connection.watchers:
        watcher()
    assert lost == ["lost"]
    stop()
    assert not connection.watchers


class Client:
    """The client of an exchange: with plain ASGI or, given a connection, with the direct writer."""

    def __init__(self, connection: FakeConnection | None = None) -> None:
        self._left = asyncio.Event()
        self._connection = connection
        scope: dict[str, Any] = {} if connection is None else {"extensions": {DIRECT_WRITER: connection.writer}}
        scope |= {"method": "POST", "path": "/", "headers": [], "query_string": b""}
        self.exchange = Exchange(scope, self._receive, self._send)

    def leave(self) -> None:
        self._left.set()
        if self._connection is not None:
            self._connection.cycle.disconnected = True
            for on_lost in tuple(self._connection.watchers):
                on_lost()

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        raise AssertionError("nothing is answered")


@pytest.fixture(params=["any server", "ours"])
async def client(request: pytest.FixtureRequest) -> Client:
    return Client(FakeConnection() if request.param == "ours" else None)


async def test_leaving_cancels_the_body(client: Client) -> None:
    entered = asyncio.Event()

    async def serve() -> None:
        with client.exchange.until_disconnected():
            entered.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await entered.wait()
    client.leave()
    with pytest.raises(ClientDisconnected):
        await asyncio.wait_for(serving, 30)


async def test_another_s_cancellation_stays_one(client: Client) -> None:
    with pytest.raises(asyncio.CancelledError), client.exchange.until_disconnected():
        raise asyncio.CancelledError


async def test_after_the_body_nothing_is_cancelled(client: Client) -> None:
    with client.exchange.until_disconnected():
        pass
    client.leave()
    await asyncio.sleep(0)


async def test_a_client_that_left_before_is_not_served() -> None:
    client = Client(FakeConnection())
    client.leave()
    with pytest.raises(ClientDisconnected), client.exchange.until_disconnected():
        raise AssertionError("it was served")
