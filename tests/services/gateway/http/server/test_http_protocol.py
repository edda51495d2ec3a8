"""What surrounds the bodies of requests is limited in size, number and time, and a refused connection is not parsed."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import HEADERS, MODEL, SOON, FakeMesh
from tests.services.gateway.http.server.raw_connection import CHUNK, CHUNKED, MIB, READ_BYTES, Connection, head
from tokenloom.services.gateway.http import client_flow
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.http.server import http_protocol
from tokenloom.services.gateway.http.server.http_protocol import (
    HEAD_SECONDS,
    LINGER_BYTES_REFUSED,
    LINGER_SECONDS,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    SLICE_BYTES,
)


@pytest.fixture
async def connection() -> Connection:
    return Connection()


def fields(number: int, size: int) -> bytes:
    """So many fields of so many bytes each."""
    return b"".join(b"%04d: %b\r\n" % (index, b"v" * (size - 8)) for index in range(number))


@pytest.mark.parametrize(
    ("sent", "is_served"),
    [
        (head(fields(90, 700)), True),
        (head(fields(90, 740)), False),
        (head(fields(1, MAX_HEAD_BYTES - 200)), True),
        (head(fields(1, MAX_HEAD_BYTES)), False),
        (head(b"", b"/" + b"p" * (MAX_HEAD_BYTES - 200)), True),
        (head(b"", b"/" + b"p" * MAX_HEAD_BYTES), False),
        (head(fields(MAX_FIELDS - 3, 8)), True),
        (head(fields(MAX_FIELDS - 2, 8)), False),
    ],
)
@pytest.mark.parametrize("is_second", [False, True])
async def test_a_head_in_one_read(connection: Connection, sent: bytes, is_served: bool, is_second: bool) -> None:
    before = [200] if is_second else []
    if is_second:
        connection.send(head(b""))
        await settle()
    connection.send(sent)
    await settle()
    assert connection.statuses == [*before, 200 if is_served else 431]
    assert connection.transport.has_ended is not is_served


ENDLESS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"a: b\r\n", 431),
    "one header": (b"GET / HTTP/1.1\r\na: ", b"b", 431),
    "path": (b"GET /", b"a", 431),
    "empty lines": (b"", b"\r\n", 431),
    "trailers": (CHUNK + b"0\r\n", b"a: b\r\n", 431),
    "one trailer": (CHUNK + b"0\r\na: ", b"b", 431),
    "chunk extension": (CHUNK + b"1;", b"a", 431),
    "last chunk extension": (CHUNK + b"0;", b"a", 431),
    "small chunks": (CHUNKED, b"1\r\na\r\n", 400),
    "chunks with extensions": (CHUNKED, b"9;%b\r\n123456789\r\n" % (b"a" * 1000), 400),
    "nonsense": (b"", b"nonsense", 400),
}


@pytest.mark.parametrize(("start", "repeated", "status"), ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("reads", [False, True])
async def test_what_has_no_end_is_closed_at_the_limit(start: bytes, repeated: bytes, status: int, reads: bool) -> None:
    connection = Connection(reads=reads)
    connection.answers.clear()
    connection.send(start)
    await settle()
    taken = connection.send(repeated * (50 * MIB // len(repeated)))
    await settle()
    assert connection.statuses == [status]
    assert connection.transport.has_ended
    assert taken <= READ_BYTES
    assert connection.parser.num_bytes <= 2 * MAX_HEAD_BYTES
    held = sum(len(name) + len(value) for name, value in connection.protocol._headers)
    assert held < MAX_HEAD_BYTES + 2 * SLICE_BYTES
    assert not connection.budget.taken


async def test_trailers_do_not_become_headers(connection: Connection) -> None:
    connection.send(CHUNKED + b"2\r\n{}\r\n0\r\nAuthorization: Bearer x\r\nExpect: 100-continue\r\n\r\n")
    await settle()
    assert connection.statuses == [200]
    assert b"authorization" not in connection.exchanges[0].headers


@pytest.mark.parametrize(("number", "status"), [(MAX_FIELDS, 200), (MAX_FIELDS + 1, 431)])
async def test_trailers_are_counted_separately(connection: Connection, number: int, status: int) -> None:
    connection.send(CHUNKED + b"2\r\n{}\r\n0\r\n" + fields(number, 600) + b"\r\n")
    await settle()
    assert connection.statuses == [status]


async def test_a_large_body_is_no_framing(connection: Connection) -> None:
    size = MIB // 2
    connection.send(b"POST / HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEADERS, size) + b" " * size)
    await settle()
    connection.send(CHUNKED + (b"4000;ext=1\r\n" + b" " * 0x4000 + b"\r\n") * (size // 0x4000) + b"0\r\n\r\n")
    await settle()
    connection.send(
        CHUNKED + b"1\r\n \r\n" * 16_000 + b"0\r\n\r\n" + CHUNKED + b"6\r\n      \r\n" * 16_000 + b"0\r\n\r\n"
    )
    await settle()
    assert connection.statuses == [200, 200, 200, 200]


async def test_after_a_refusal_nothing_is_parsed(connection: Connection) -> None:
    connection.send(head(fields(MAX_FIELDS, 8)))
    parsed = connection.parser.num_bytes
    connection.protocol.data_received(head(b""))
    await settle()
    assert connection.parser.num_bytes == parsed
    assert connection.statuses == [431]
    assert not connection.transport.is_closed, "its client may read the answer"
    pass_time(LINGER_SECONDS)
    await settle()
    assert connection.transport.is_closed


async def test_a_client_that_sends_on_after_a_refusal_is_cut_off(connection: Connection) -> None:
    connection.send(b"nonsense")
    for _ in range(LINGER_BYTES_REFUSED // READ_BYTES):
        connection.protocol.data_received(b"x" * READ_BYTES)
    assert not connection.transport.is_closed
    connection.protocol.data_received(b"x")
    assert connection.transport.is_closed


async def test_a_refusal_before_the_end_of_the_body_closes_the_connection() -> None:
    connection = Connection(reads=False)
    connection.send(b"POST / HTTP/1.1\r\n%bContent-Length: 1000000\r\n\r\n{" % HEADERS)
    await settle()
    assert connection.statuses == [200]
    assert b"connection: close" in connection.transport.sent
    parsed = connection.parser.num_bytes
    connection.protocol.data_received(b"x" * 1000)
    assert connection.parser.num_bytes == parsed
    assert connection.transport.has_ended
    assert not connection.budget.taken


async def test_too_many_pipelined_requests_close_the_connection(connection: Connection) -> None:
    connection.answers.clear()
    connection.send((CHUNKED + b"2\r\n{}\r\n0\r\n\r\n") * (MAX_PIPELINED + 1))
    await settle()
    assert not connection.transport.is_closed
    connection.send(head(b""))
    assert connection.transport.is_closed
    connection.protocol.connection_lost(None)
    await settle()
    assert connection.budget.taken == 2, "the one that is being answered holds its body"
    assert not connection.transport.sent


@pytest.mark.parametrize("num_answered", [0, 1])
async def test_a_request_that_is_cut_with_those_behind_it_is_no_error(
    connection: Connection, caplog: pytest.LogCaptureFixture, num_answered: int
) -> None:
    numbers = itertools.count()
    left: list[int] = []

    async def app(exchange: HttpExchange) -> None:
        if (number := next(numbers)) < num_answered:
            await exchange.respond(200, b"ok")
            return
        lost = asyncio.Event()
        exchange.response.watch(lost.set)
        await lost.wait()
        left.append(number)

    connection.app = app
    connection.send(CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + head(b"") * (num_answered + 1))
    await settle()
    connection.transport.close()
    connection.protocol.connection_lost(None)
    await settle()
    assert left == [num_answered]
    assert connection.statuses == [200] * num_answered
    assert [record.getMessage() for record in caplog.records] == []


async def test_a_bad_head_behind_a_live_request_does_not_write_into_its_response(connection: Connection) -> None:
    connection.answers.clear()
    connection.send(head(b""))
    await settle()
    connection.send(b"GET / HTTP/1.1\r\n" + fields(MAX_FIELDS + 2, 8))
    assert connection.transport.is_closed
    assert not connection.transport.sent


@pytest.mark.parametrize("token", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("framing", ["length", "chunks", "none"])
async def test_an_upgrade_is_ignored_and_the_body_read(
    connection: Connection, token: bytes, step: int, framing: str
) -> None:
    """Java's client sends ``Upgrade: h2c`` with the body of its first request."""
    body = head(b"")  # it is not taken for a request
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: %b\r\n" % token
    fields, sent = {
        "length": (b"Content-Length: %d\r\n" % len(body), body),
        "chunks": (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        "none": (b"", b""),
    }[framing]
    data = b"POST / HTTP/1.1\r\n%b%b%b\r\n" % (HEADERS, upgrade, fields) + sent + head(b"")
    bodies: list[bytes] = []

    async def answer(exchange: HttpExchange) -> None:
        with await exchange.read_body(MIB) as received:
            bodies.append(bytes(received.data))
        await exchange.respond(200, b"ok")

    connection.app = answer
    for start in range(0, len(data), step):
        connection.send(data[start : start + step])
        await settle()
    assert connection.statuses == [200, 200]
    assert bodies == [b"" if framing == "none" else body, b""]
    assert not connection.transport.is_closed


async def test_a_request_without_a_host_is_refused(connection: Connection) -> None:
    connection.send(b"GET / HTTP/1.1\r\n\r\n")
    await settle()
    assert connection.statuses == [400]
    assert connection.transport.has_ended


async def test_http_1_0_needs_no_host(connection: Connection) -> None:
    connection.reads = False
    connection.send(b"GET / HTTP/1.0\r\n\r\n")
    await settle()
    assert connection.statuses == [200]


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", []),
        (b"\r\n", []),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", [408]),
        (head(b"") + b"\r\n", [200]),
        (head(b"") + b"GET", [200, 408]),
        (CHUNKED + b"2\r\n{}\r\n0\r\nA: b\r\n", [408]),
        (CHUNKED + b"2\r\n{}\r\n2;a=", [408]),
    ],
)
async def test_what_does_not_come_is_given_up(connection: Connection, sent: bytes, statuses: list[int]) -> None:
    for byte in sent:
        connection.send(bytes([byte]))
    await settle()
    pass_time(HEAD_SECONDS)
    await settle()
    assert connection.statuses == statuses
    assert connection.transport.is_closed or connection.transport.has_ended


async def test_an_idle_connection_stays(connection: Connection) -> None:
    connection.send(head(b""))
    await settle()
    pass_time(HEAD_SECONDS)
    await settle()
    connection.send(head(b""))
    await settle()
    assert connection.statuses == [200, 200]


async def test_a_head_behind_a_live_request_may_take_its_time(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 20)
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEADERS, len(body))
    reader, writer = await connect(mesh)
    writer.write(head + body + b"GET /ping HTTP/1.1\r\n")
    request = await mesh.outputs.next_request()
    pass_time(50)
    await settle()
    request.answer("done")
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), SOON)
    await asyncio.wait_for(reader.readuntil(b"done"), SOON)
    await settle()
    pass_time(20)
    answers = await asyncio.wait_for(reader.read(), SOON)
    assert b"408" in answers, "then it is given up too"
    writer.close()


async def test_a_client_that_still_sends_gets_the_refusal(socket_dir: Path) -> None:
    """Closing at once would reset the connection, and the client's machine might drop the answer."""
    async with FakeMesh(socket_dir).gateway(api_key=("k",)) as mesh:
        reader, writer = await connect(mesh)
        writer.write(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: 8000000\r\n\r\n" % HEADERS)
        answer = b""
        while not reader.at_eof():
            if not writer.is_closing():
                writer.write(b" " * 65536)
            answer += await asyncio.wait_for(reader.read(65536), SOON)
        assert b"401 Unauthorized" in answer
        assert b"an API key is required" in answer
        writer.close()


async def connect(mesh: FakeMesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = mesh.http_address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_client_that_pipelines_and_leaves_cancels_its_request(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a request that is live, the next one stops the reading, which alone reports that the client has left."""
    # Time that only passes for the loop would end the limit below, too, before the news of a busy machine arrives.
    monkeypatch.setattr(client_flow, "LOOK_SECONDS", 0.001)
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (HEADERS, len(body), body)
    host, _, port = mesh.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    live = await mesh.outputs.next_request()  # it is watched before the next one comes
    writer.write(request * 2)
    await writer.drain()
    await settle()
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(SOON):
        await live.cancelled.wait()
    assert mesh.outputs.requests.empty(), "the others were not begun"
    assert reader.at_eof() or await reader.read() == b""


async def test_pipelined_requests_are_read_after_the_answers_before_them(connection: Connection) -> None:
    flow = connection.protocol.flow
    connection.answers.clear()
    connection.send(head(b""))
    await settle()
    assert not flow.read_paused
    connection.send(head(b"") * 2)
    await settle()
    assert flow.read_paused
    connection.protocol._body.close()  # type: ignore[union-attr]
    assert flow.read_paused, "a body does not release what the pipeline holds"
    connection.answers.set()
    await settle()
    assert (connection.statuses, flow.read_paused) == ([200, 200, 200], False)
