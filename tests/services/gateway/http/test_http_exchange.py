"""Writing past ASGI, clients that leave, and what a body must be declared as."""

import asyncio
import logging
from typing import Any, cast

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tokenloom.request import errors
from tokenloom.services.gateway.http.byte_budget import ByteBudget
from tokenloom.services.gateway.http.client_flow import ClientFlow
from tokenloom.services.gateway.http.http_exchange import (
    DIRECT_WRITER,
    REQUEST_BODY,
    DirectWriter,
    HttpExchange,
    UnsupportedMediaType,
    Watchers,
)
from tokenloom.services.gateway.http.request_body import ClientDisconnected, RequestBody


def _tree(cls: type[errors.TokenloomError]) -> list[type[errors.TokenloomError]]:
    return [leaf for child in cls.__subclasses__() for leaf in (child, *_tree(child))]


class FakeTransport:
    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing follows."""

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


class FakeConnection:
    """A connection in the middle of a POST."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.flow = ClientFlow(cast(asyncio.Transport, self.transport))
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
        self.left = False
        self.writer = DirectWriter(self.cycle, self.watchers, self._leave)
        self.body = RequestBody(self.cycle, ByteBudget(1000))

    def _leave(self) -> None:
        self.left = True

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


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_beginning_looks_like_one_that_was_sent(keep_alive: bool) -> None:
    headers, body = [(b"x-request-id", b"1"), (b"content-type", b"text/event-stream")], b"data: {}\n\n"
    sent, begun = FakeConnection(), FakeConnection()
    for connection in (sent, begun):
        connection.cycle.default_headers = [(b"date", b"today")]
        connection.cycle.keep_alive = keep_alive
        assert connection.writer.can_begin
    await sent.cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
    await sent.cycle.send({"type": "http.response.body", "body": body, "more_body": True})
    begun.writer.begin(headers, body)
    assert begun.transport.sent == sent.transport.sent
    for connection in (sent, begun):
        assert connection.writer.is_open
        assert not connection.writer.can_begin
        await connection.cycle.send({"type": "http.response.body", "body": body, "more_body": False})
    assert begun.transport.sent == sent.transport.sent
    assert begun.cycle.response_complete


async def test_a_beginning_without_a_piece_of_the_body_does_not_end_it() -> None:
    connection = FakeConnection()
    connection.writer.begin([], b"")
    assert connection.transport.sent.endswith(b"transfer-encoding: chunked\r\n\r\n")


async def test_a_response_begins_at_once_only_while_the_client_reads_and_the_connection_stays() -> None:
    connection = FakeConnection()
    connection.flow.pause_writing()
    assert not connection.writer.can_begin, "the client is slow"
    connection.flow.resume_writing()
    connection.writer.is_last = lambda: True
    assert not connection.writer.can_begin, "the head must announce the end of the connection"
    connection.writer.is_last = lambda: False
    connection.cycle.disconnected = True
    assert not connection.writer.can_begin, "the client left"


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


def test_a_watcher_is_called_when_the_client_leaves() -> None:
    connection = FakeConnection()
    lost: list[str] = []

    def on_lost() -> None:
        lost.append("lost")

    stop = connection.writer.watch(on_lost)
    for watcher in connection.watchers:
        watcher()
    assert lost == ["lost"]
    stop()
    assert not connection.watchers


class Client:
    """The client of an exchange."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.connection = FakeConnection()
        extensions = {DIRECT_WRITER: self.connection.writer, REQUEST_BODY: self.connection.body}
        scope = {"method": "POST", "path": "/", "headers": headers, "query_string": b"", "extensions": extensions}
        self.exchange = HttpExchange(scope, cast(Any, self.connection.cycle.send))

    def send_body(self, body: bytes) -> None:
        self.connection.body.arrive(body)
        self.connection.cycle.more_body = False

    def leave(self) -> None:
        self.connection.cycle.disconnected = True
        for on_lost in tuple(self.connection.watchers):
            on_lost()


@pytest.fixture
async def client() -> Client:
    return Client()


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON ; charset=utf-8"])
async def test_a_json_body(kind: bytes) -> None:
    client = Client((b"content-type", kind))
    client.send_body(b"{}")
    with await client.exchange.read_body(2) as body:
        assert body.data == b"{}"
    assert not body.data


@pytest.mark.parametrize(
    "headers", [(), *([(b"content-type", kind)] for kind in (b"text/plain", b"", b"application/ld+json", b"json"))]
)
async def test_other_types_are_refused(headers: Any) -> None:
    client = Client(*headers)
    client.send_body(b"{}")
    with pytest.raises(UnsupportedMediaType, match="application/json"):
        await client.exchange.read_body(2)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_response_before_the_end_of_the_body_is_the_last(is_whole: bool) -> None:
    client = Client()
    client.connection.body.arrive(b"{")
    client.connection.cycle.more_body = not is_whole
    await client.exchange.respond(401, b"{}")
    assert (b"connection: close" in client.connection.transport.sent) is not is_whole
    assert client.connection.left is not is_whole


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


async def test_a_client_that_left_before_is_not_served(client: Client) -> None:
    client.leave()
    with pytest.raises(ClientDisconnected), client.exchange.until_disconnected():
        raise AssertionError("it was served")


@pytest.mark.parametrize("cls", [cls for cls in _tree(errors.TokenloomError) if cls.__module__ == errors.__name__])
async def test_a_final_error_says_that_it_must_not_be_retried(cls: type[errors.TokenloomError]) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    connection = FakeConnection()
    extensions = {DIRECT_WRITER: connection.writer, REQUEST_BODY: connection.body}
    scope = {"method": "POST", "path": "/", "query_string": b"", "headers": [], "extensions": extensions}
    error = cls("what was wrong")
    error.retry_after = 1.5
    await HttpExchange(scope, send).fail(error)
    headers = dict(sent[0]["headers"])
    assert (headers.get(b"x-should-retry"), headers.get(b"retry-after")) == (
        (b"false", None) if cls.is_final else (None, b"2")
    )
