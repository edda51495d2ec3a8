"""Heads, bodies and chunks as clients receive them, and when a response can be written without waiting."""

import pytest

from tests.services.gateway.http.test_http_exchange import FakeConnection

STREAM = [(b"x-request-id", b"1"), (b"content-type", b"text/event-stream")]
EVENT = b"data: {}\n\n"
CHUNK = b"a\r\ndata: {}\n\n\r\n"


@pytest.mark.parametrize("keep_alive", [True, False])
def test_a_stream_has_chunks(keep_alive: bool) -> None:
    connection = FakeConnection(keep_alive=keep_alive)
    connection.default_headers = [(b"date", b"today")]
    assert connection.response.can_begin
    connection.response.begin(200, STREAM, EVENT)
    assert connection.response.is_open
    assert not connection.response.can_begin
    connection.response.write(EVENT)
    connection.response.finish(EVENT)
    assert connection.transport.sent == (
        b"HTTP/1.1 200 OK\r\ndate: today\r\nx-request-id: 1\r\ncontent-type: text/event-stream\r\n"
        + (b"" if keep_alive else b"connection: close\r\n")
        + b"transfer-encoding: chunked\r\n\r\n"
        + CHUNK * 3
        + b"0\r\n\r\n"
    )
    assert connection.ended == [(keep_alive, False)]


def test_a_client_of_http_1_0_reads_to_the_end_of_the_connection() -> None:
    connection = FakeConnection(speaks_1_1=False, keep_alive=False)
    connection.response.begin(200, STREAM, EVENT)
    assert not connection.response.is_open
    connection.response.write(EVENT)
    connection.response.finish()
    head, _, body = connection.transport.sent.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == EVENT * 2
    assert connection.ended == [(False, False)]


def test_a_body_of_known_length_has_no_chunks() -> None:
    connection = FakeConnection()
    connection.response.begin(200, [(b"content-length", b"3")], b"a")
    assert not connection.response.is_open
    connection.response.write(b"b")
    connection.response.finish(b"c")
    assert connection.transport.sent == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"


@pytest.mark.parametrize(("body", "error"), [(b"ab", "1 bytes shorter"), (b"abcd", "1 bytes longer")])
def test_a_body_that_is_not_as_long_as_announced_does_not_end(body: bytes, error: str) -> None:
    connection = FakeConnection()
    connection.response.begin(200, [(b"content-length", b"3")])
    with pytest.raises(RuntimeError, match=error):
        connection.response.finish(body)
    assert not connection.ended


@pytest.mark.parametrize("headers", [[(b"content-length", b"3")], STREAM])
def test_a_response_to_head_has_no_body(headers: list[tuple[bytes, bytes]]) -> None:
    connection = FakeConnection(is_head=True)
    connection.response.begin(200, headers, b"abc")
    connection.response.write(b"abc")
    connection.response.finish(b"abc")
    assert connection.transport.sent.endswith(b"\r\n\r\n")
    assert connection.transport.sent.count(b"\r\n\r\n") == 1
    assert connection.ended == [(True, False)]


def test_no_body_after_a_status_without_one() -> None:
    connection = FakeConnection()
    connection.response.begin(304, [])
    connection.response.finish()
    assert connection.transport.sent == b"HTTP/1.1 304 Not Modified\r\n\r\n"


def test_a_beginning_without_a_piece_of_the_body_does_not_end_it() -> None:
    connection = FakeConnection()
    connection.response.begin(200, [])
    assert connection.transport.sent.endswith(b"transfer-encoding: chunked\r\n\r\n")


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\0"])
def test_a_header_that_would_break_the_head_is_not_written(value: bytes) -> None:
    connection = FakeConnection()
    with pytest.raises(ValueError, match="control character"):
        connection.response.begin(200, [(b"x-request-id", value)])
    assert not connection.transport.sent


def test_a_response_begins_at_once_only_while_the_client_reads_and_the_connection_stays() -> None:
    connection = FakeConnection()
    connection.flow.pause_writing()
    assert not connection.response.can_begin, "the client is slow"
    connection.flow.resume_writing()
    connection.is_ending = True
    assert not connection.response.can_begin, "the head must announce the end of the connection"
    connection.is_ending = False
    assert connection.response.can_begin
    connection.flow.lose()
    assert not connection.response.can_begin, "the client left"


def test_open_only_while_the_client_reads_a_chunked_response() -> None:
    connection = FakeConnection()
    assert not connection.response.is_open, "the response has not begun"
    connection.response.begin(200, [])
    assert connection.response.is_open
    connection.flow.pause_writing()
    assert not connection.response.is_open, "the client is slow"
    connection.flow.resume_writing()
    connection.flow.lose()
    assert not connection.response.is_open, "the client left"


def test_nothing_is_written_to_a_client_that_left() -> None:
    connection = FakeConnection()
    connection.response.begin(200, [])
    connection.transport.sent = b""
    connection.flow.lose()
    connection.response.write(EVENT)
    connection.response.finish(EVENT)
    assert not connection.transport.sent
    assert not connection.ended


def test_a_watcher_is_called_when_the_client_leaves() -> None:
    connection = FakeConnection()
    lost: list[str] = []
    connection.response.watch(lambda: lost.append("watched"))
    stop = connection.response.watch(lambda: lost.append("stopped"))
    stop()
    connection.flow.lose()
    assert lost == ["watched"]
