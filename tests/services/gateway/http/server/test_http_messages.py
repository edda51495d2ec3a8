"""How messages of a connection are read: ambiguous ones are refused, pieces of any size make the same requests."""

import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import HEADERS
from tests.services.gateway.http.server.raw_connection import CHUNK, CHUNKED, Connection, head
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.http.server.http_server import KEEP_ALIVE_SECONDS


@pytest.fixture
async def connection() -> Connection:
    return Connection()


AMBIGUOUS = {
    "both lengths": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, the other way round": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "a list of lengths": b"Content-Length: 4, 4\r\n\r\nabcd",
    "a signed length": b"Content-Length: +4\r\n\r\nabcd",
    "a negative length": b"Content-Length: -1\r\n\r\n",
    "a length beyond 64 bits": b"Content-Length: 18446744073709551616\r\n\r\n",
    "an encoding after chunks": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a continued line": b"X-A: b\r\n Content-Length: 4\r\n\r\nabcd",
    "a line that ends with LF": b"X-A: b\nContent-Length: 4\r\n\r\nabcd",
    "a line that ends with CR": b"X-A: b\rContent-Length: 4\r\n\r\nabcd",
    "a blank before the colon": b"Content-Length : 4\r\n\r\nabcd",
    "two hosts": b"Host: elsewhere\r\nContent-Length: 0\r\n\r\n",
    "the same host twice": b"host: localhost\r\nContent-Length: 0\r\n\r\n",
    "a NUL": b"X-A: b\0c\r\n\r\n",
    "a chunk size with a sign": b"Transfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
    "a chunk size with a prefix": b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    "a chunk size beyond 64 bits": b"Transfer-Encoding: chunked\r\n\r\n10000000000000001\r\na\r\n",
    "a chunk that ends with LF": b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n",
    "a chunk longer than its size": b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_what_two_servers_could_read_differently_is_refused(connection: Connection, rest: bytes) -> None:
    """Behind a proxy that reads it in another way, the rest would be a request of the proxy's next client."""
    connection.send(b"POST / HTTP/1.1\r\n" + HEADERS + rest + head(b""))
    await settle()
    assert connection.statuses == [400]
    assert connection.transport.has_ended


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_requests_arrive_in_pieces_of_any_size(connection: Connection, size: int) -> None:
    body = b"3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nX-Trailer: a\r\n\r\n"
    sent = head(b"") + CHUNKED + body + head(b"")
    for start in range(0, len(sent), size):
        connection.send(sent[start : start + size])
        await settle()
    assert connection.statuses == [200] * 3
    assert [exchange.method for exchange in connection.exchanges] == ["POST"] * 3


@pytest.mark.parametrize("cut", [b"", CHUNK, CHUNKED + b"5\r\nab"])
async def test_half_a_connection_is_none(connection: Connection, cut: bytes) -> None:
    """A client that has closed its sending half is taken to have left, in a body or while its request is answered."""
    connection.answers.clear()
    connection.send(cut or head(b""))
    await settle()
    assert not connection.protocol.eof_received(), "the transport closes the connection then"
    connection.transport.close()
    connection.protocol.connection_lost(None)
    connection.answers.set()
    await settle()
    assert not connection.transport.sent
    assert not connection.budget.taken


async def test_a_client_of_http_1_0_is_answered_and_sent_away(connection: Connection) -> None:
    connection.send(b"POST / HTTP/1.0\r\n%bContent-Length: 2\r\n\r\n{}" % HEADERS)
    await settle()
    assert connection.statuses == [200]
    assert b"connection: close" in connection.transport.sent
    assert connection.transport.is_closed


async def test_the_client_that_asks_first_is_invited(connection: Connection) -> None:
    connection.send(b"POST / HTTP/1.1\r\n%bContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n" % HEADERS)
    await settle()
    assert connection.transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(b"{}")
    await settle()
    assert connection.statuses == [100, 200]


async def test_a_client_that_is_refused_is_not_invited() -> None:
    connection = Connection(reads=False)
    connection.send(b"POST / HTTP/1.1\r\n%bContent-Length: 2\r\nExpect: 100-continue\r\n\r\n" % HEADERS)
    await settle()
    assert connection.statuses == [200]
    assert connection.transport.has_ended


async def test_a_connection_without_requests_is_closed_after_its_time(connection: Connection) -> None:
    connection.send(head(b""))
    await settle()
    pass_time(KEEP_ALIVE_SECONDS - 1)
    await settle()
    connection.send(head(b""))
    await settle()
    pass_time(KEEP_ALIVE_SECONDS - 1)
    await settle()
    assert not connection.transport.is_closed
    pass_time(1)
    await settle()
    assert connection.transport.is_closed
    assert connection.statuses == [200, 200]


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a?b=c", "/a", b"b=c"),
        (b"/a%20b", "/a b", b""),
        (b"http://host/a?b", "/a", b"b"),
        (b"http://host", "/", b""),
    ],
)
async def test_targets(connection: Connection, target: bytes, path: str, query: bytes) -> None:
    connection.send(b"POST %b HTTP/1.1\r\n%bContent-Length: 0\r\n\r\n" % (target, HEADERS))
    await settle()
    (exchange,) = connection.exchanges
    assert (exchange.path, exchange.query) == (path, query)


async def test_a_response_that_is_not_completed_ends_the_connection(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(exchange: HttpExchange) -> None:
        await exchange.start(200, [])
        raise RuntimeError("a bug")

    connection.app = app
    connection.send(head(b""))
    await settle()
    assert connection.transport.is_closed
    assert ["could not be completed" in record.getMessage() for record in caplog.records] == [True]
