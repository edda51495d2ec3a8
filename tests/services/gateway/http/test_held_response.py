"""What is stored of a response says, at any time, what its client gets and what is missing of it."""

import asyncio
import contextlib
import errno
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.client_flow import ClientFlow
from tokenloom.services.gateway.http.held_response import HeldResponse, hold_arrival, hold_response
from tokenloom.services.gateway.http.held_table import (
    ARRIVED,
    BEGUN,
    CHUNKED,
    FOLLOWED,
    MOST_AT_ONCE,
    MOST_FILE_BYTES,
    MOST_REQUEST_BYTES,
    NAMED,
    REQUEST_BYTES,
    RING_BYTES,
    HeldRecord,
    HeldTable,
    OutputEntry,
    PastResponse,
)
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.http.request_body import RequestBody
from tokenloom.services.gateway.http.tcp_counters import num_taken
from tokenloom.services.gateway.responses.output_items import Events

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
END = b"0\r\n\r\n"
ID = "a" * 40
SOON = 30.0


class Connection:
    """A connection over TCP: the server's transport, and the client's socket."""

    def __init__(self, transport: asyncio.Transport, client: socket.socket) -> None:
        self.transport = transport
        self.client = client
        self.flow = ClientFlow(transport)

    def exchange(self, path: str = "/v1/completions", **headers: str) -> HttpExchange:
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        body = RequestBody(self.flow, AdmissionLimit(1 << 20))
        sink: Any = None  # nothing is written by the exchange itself
        return HttpExchange(("POST", path, b"a=1"), pairs, body, sink)

    def begin(self, table: HeldTable, body: bytes = b"{}", **headers: str) -> HeldResponse:
        held = hold_response(table, self.flow, self.exchange(host="here", **headers), body, 0)
        assert held is not None
        return held


@asynccontextmanager
async def connected() -> AsyncIterator[Connection]:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
        try:
            client.setblocking(False)
            yield Connection(transport, client)
        finally:
            if not transport.is_closing():
                transport.abort()
            await asyncio.sleep(0)


def only(records: Iterator[HeldRecord]) -> HeldRecord:
    (record,) = records
    return record


async def test_what_the_kernel_has_taken_is_not_missing() -> None:
    table = HeldTable(2)
    async with connected() as connection:
        connection.transport.write(b"of an earlier response")
        held = connection.begin(table)
        held.name(ID, [0, 0])
        held.mark_shaped()
        connection.flow.transport.write(HEAD)
        held.advance(1, 3, 11, 1)
        connection.flow.transport.write(b"5\r\nhello\r\n")
        record = only(table.records())
        assert record.base == len(b"of an earlier response")
        assert record.missing(num_taken(record.descriptor)) == b""
        assert record.missing(record.base) == HEAD + b"5\r\nhello\r\n"
        assert record.missing(record.base + record.total - 4) == b"lo\r\n"
        assert record.missing(record.base + record.total + 1) is None  # of another response
        assert record.missing(record.base - 1) is None
        assert record.past.entries == (OutputEntry(), OutputEntry(True, False, 3, 11))
        assert (record.past.request_id, record.past.has_begun, record.past.has_first) == (ID, True, True)
        assert not record.past.is_over


async def test_the_request_comes_back_as_the_parser_reads_it() -> None:
    table = HeldTable(2)
    async with connected() as connection:
        connection.begin(
            table, b'{"a": 1}', authorization="Bearer key", transfer_encoding="chunked", x_request_id="mine"
        )
        assert only(table.records()).past.request == (
            b"POST /v1/completions?a=1 HTTP/1.1\r\nhost: here\r\nauthorization: Bearer key\r\n"
            b'x-request-id: mine\r\ncontent-length: 8\r\n\r\n{"a": 1}'
        )


@pytest.mark.parametrize("size", [1, 14 << 10, 15 << 10, 900 << 10])
async def test_requests_of_any_size(size: int) -> None:
    table = HeldTable(2)
    async with connected() as connection:
        held = connection.begin(table, b"x" * size)
        assert only(table.records()).past.request.endswith(b"\r\n\r\n" + b"x" * size)
        held.close()
        assert (table.num_held, list(table.records())) == (0, [])


async def test_what_cannot_be_continued_is_not_held() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        assert hold_response(table, connection.flow, connection.exchange(), b"x" * (1 << 20), 0) is None
        assert hold_response(table, connection.flow, connection.exchange("/v1/a b"), b"", 0) is None
        assert table.num_held == 0
        held = connection.begin(table)
        assert hold_response(table, connection.flow, connection.exchange(), b"", 0) is None  # no slot is left
        held.close()
        assert hold_response(HeldTable(0), connection.flow, connection.exchange(), b"", 0) is None
    mine, other = socket.socketpair()
    with other:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, mine)
        assert (
            hold_response(table, ClientFlow(transport), connection.exchange(), b"", 0) is None
        )  # the kernel does not count
        transport.abort()
        await asyncio.sleep(0)


async def test_requests_that_arrive_leave_slots_to_those_of_which_more_is_known() -> None:
    """Nothing is known of the clients that send first bytes."""
    table = HeldTable(4)
    async with connected() as one, connected() as two, connected() as three:
        arrived = hold_arrival(table, one.flow, b"POST", 0)
        assert arrived is not None
        assert hold_arrival(table, two.flow, b"POST", 0) is not None
        assert hold_arrival(table, three.flow, b"POST", 0) is None
        arrived.know()
        other = hold_arrival(table, three.flow, b"POST", 0)
        assert other is not None
        other.close()
        arrived.close()
        assert hold_arrival(table, one.flow, b"POST", 0) is not None
        three.begin(table)
        assert table.num_held == 3


async def test_what_is_stored_behind_a_request_is_lost_once_it_is_answered() -> None:
    table = HeldTable(4)
    async with connected() as connection:
        held = hold_arrival(table, connection.flow, b"two requests", 0)
        assert held is not None
        held.mark_followed(is_stored=True)
        assert only(table.records()).past.state == ARRIVED
        connection.flow.transport.write(PLAIN_HEAD)
        assert only(table.records()).past.state & FOLLOWED
        held.close()
        await asyncio.sleep(0)
        assert not table.num_held
    async with connected() as connection:
        held = hold_arrival(table, connection.flow, b"two requests and a part of a third one", 0)
        assert held is not None
        held.mark_followed()
        held.mark_followed(is_stored=True)
        assert only(table.records()).past.state == ARRIVED | FOLLOWED


@pytest.mark.parametrize("size", [1, 700, MOST_AT_ONCE - 1, MOST_AT_ONCE])
async def test_the_last_bytes_are_kept(size: int) -> None:
    """Also where they begin at the end of the ring."""
    table = HeldTable(1)
    async with connected() as connection:
        connection.begin(table)
        written = b""
        for number in range(3 * RING_BYTES // size + 2 if size > 1 else 300):
            piece = bytes([number % 251]) * size
            connection.flow.transport.write(piece)
            written += piece
            with contextlib.suppress(BlockingIOError):
                connection.client.recv(1 << 20)
            await asyncio.sleep(0)
            record = only(table.records())
            assert record.total == len(written)
            assert written.endswith(record.last)
            assert len(record.last) == min(len(written), RING_BYTES - MOST_AT_ONCE)


async def test_a_piece_that_was_stored_in_part_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a kill between the bytes and the word that makes them count."""
    table = HeldTable(1)
    async with connected() as connection:
        held = connection.begin(table)
        held.name(ID, [0])
        for _ in range(RING_BYTES // 1000 + 1):
            held.advance(0, 1, 1, 1)
            connection.flow.transport.write(b"a" * 1000)
        before = only(table.records())
        monkeypatch.setattr(HeldResponse, "_store", lambda _: None)
        held.advance(0, 2, 1, 3)
        connection.flow.transport.write(b"b" * MOST_AT_ONCE)
        assert only(table.records()) == before


async def test_bytes_that_are_not_stored_end_what_can_be_continued() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        connection.begin(table)
        connection.flow.transport.write(HEAD)
        connection.flow.transport.write(b"x" * (MOST_REQUEST_BYTES + 1))
        connection.flow.transport.write(b"y")
        record = only(table.records())
        assert record.missing(record.base + len(HEAD)) == b""
        assert record.missing(num_taken(record.descriptor)) is None


async def test_large_pieces_are_stored_with_what_the_kernel_has_not_taken_before_them() -> None:
    table, rng = HeldTable(1), random.Random(5)
    async with connected() as connection:
        held = connection.begin(table)
        connection.flow.transport.write(written := HEAD)

        def num_left_after(size: int) -> int:
            nonlocal written
            connection.flow.transport.write(piece := rng.randbytes(size))
            written += piece
            record, num_left = only(table.records()), connection.transport.get_write_buffer_size()
            assert record.total == len(written)
            assert record.missing(record.base + len(written) - num_left) == written[len(written) - num_left :]
            return num_left

        for size in (9, MOST_AT_ONCE + 1, MOST_AT_ONCE, 9 * MOST_AT_ONCE):
            num_left_after(size)
        while not num_left_after(9 * MOST_AT_ONCE):  # the client reads nothing
            pass
        for size in (40, MOST_AT_ONCE + 1, 40, 9 * MOST_AT_ONCE):
            assert num_left_after(size) > size, "the kernel takes bytes"
        connection.flow.transport.write(END)
        held.close()
        connection.transport.abort()
        await until_free(table)
        assert table.file_bytes == 0


async def test_a_request_is_stored_piece_by_piece() -> None:
    """At any time there is all that has arrived; a part of the room for files is for what is known."""
    table, rng = HeldTable(4), random.Random(6)
    async with connected() as connection:
        held = hold_arrival(table, connection.flow, request := rng.randbytes(9), 9)
        assert held is not None
        for size in (REQUEST_BYTES - 10, 1, 1, 50_000, 7):
            piece = rng.randbytes(size)
            assert held.arrive(piece)
            record, request = only(table.records()), request + piece
            assert (record.past.request, record.num_read) == (request, len(request))
        most = MOST_FILE_BYTES // 2
        files = [table.open_file(bytes(MOST_REQUEST_BYTES)) for _ in range(most // MOST_REQUEST_BYTES)]
        assert not held.arrive(b"x")
        async with connected() as other:
            assert hold_arrival(table, other.flow, bytes(REQUEST_BYTES + 1), 0) is None
        assert only(table.records()).past.request == request
        for file in files:
            assert file is not None
            table.close_file(file)
        held.close()
        assert table.file_bytes == 0


async def until_free(table: HeldTable) -> None:
    async with asyncio.timeout(SOON):
        while table.num_held:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_there_is_room_for_so_many_bytes_in_files() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        connection.begin(table)
        files = [table.open_file(bytes(MOST_REQUEST_BYTES)) for _ in range(MOST_FILE_BYTES // MOST_REQUEST_BYTES)]
        assert None not in files
        assert table.open_file(b"x") is None
        connection.flow.transport.write(HEAD)
        connection.flow.transport.write(bytes(MOST_AT_ONCE + 1))
        assert only(table.records()).total == len(HEAD)
        for file in files:
            assert file is not None
            table.close_file(file)
        again = table.open_file(b"x")
        assert again is not None
        table.close_file(again)


class Stores:
    """Stands in the place of memory, and calls a function after each store: a kill may come there."""

    def __init__(self, memory: Any, after: Callable[[], None]) -> None:
        self._memory, self._after = memory, after

    def __getitem__(self, place: Any) -> Any:
        return self._memory[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._memory[place] = value
        self._after()


@pytest.mark.parametrize("seed", range(8))
async def test_bytes_and_positions_fit_together_after_each_store(seed: int) -> None:
    """Pieces of one output in any order and size, more than three rounds of the ring."""
    rng, table = random.Random(seed), HeldTable(1)
    async with connected() as connection:
        held = connection.begin(table)
        held.name(ID, [0])
        written, tokens, chars, has_event = b"", 0, 0, False
        allowed: list[tuple[int, OutputEntry]] = []
        num_looks = 0

        def look() -> None:
            nonlocal num_looks
            record = only(table.records())
            assert (record.total, record.past.entries[0]) in allowed
            expected = (written + piece)[: record.total]
            assert expected.endswith(record.last)
            num_looks += 1

        pack = held._pack

        def watched_pack(memory: Any, *values: Any) -> None:
            pack(table.memory, *values)
            look()

        held._pack = watched_pack  # type: ignore[assignment]
        held._memory, held._words = Stores(table.memory, look), Stores(table.words, look)  # type: ignore[assignment]
        held._write = lambda data: None  # the kernel has no part here
        piece = HEAD
        allowed = [(0, OutputEntry()), (len(HEAD), OutputEntry())]
        connection.flow.transport.write(piece)
        written += piece
        while num_looks <= 400 or len(written) < 3 * RING_BYTES:
            kind = rng.choice(("put", "put", "put", "put", "skip", "advance", "beat"))
            before = OutputEntry(has_event, False, tokens, chars)
            new_tokens, new_chars = rng.choice((1, 1, 1, 3, 127, 128, 900)), rng.choice((0, 4, 4, 4, 127, 128, 900))
            if kind == "skip":
                piece, allowed = b"", [(len(written), before)]
                held.skip(new_tokens, new_chars)
                tokens, chars = tokens + new_tokens, chars + new_chars
                # Of what is written next.
                kind, new_tokens, new_chars = "put", 1, 2
            body = b"e" * rng.choice((1, 150, 150, 150, 3000, 3000, 20_000))
            if kind == "beat":
                new_tokens = new_chars = 0
            tokens, chars = tokens + new_tokens, chars + new_chars
            has_event = has_event or kind != "beat"
            piece = b"%x\r\n%b\r\n" % (len(body), body)
            allowed = [(len(written), before), (len(written + piece), OutputEntry(has_event, False, tokens, chars))]
            if kind == "put":
                held.put(body, new_tokens, new_chars)
            else:
                if kind == "advance":
                    held.advance(0, tokens, new_chars, 1)
                connection.flow.transport.write(piece)
            written += piece
            record = only(table.records())
            assert (record.total, record.past.entries[0]) == allowed[-1]
        held.close()
        held.put(b"late", 1, 4)  # of a stream that has not noticed its end
        connection.begin(table)
        assert only(table.records()).total == 0


async def test_a_slot_that_is_used_again_has_nothing_of_its_last_response() -> None:
    table, totals = HeldTable(1), list[int]()
    async with connected() as connection:
        for _ in range(2):  # the second time at each store
            held = connection.begin(table)
            held.name(ID, [1])
            connection.flow.transport.write(HEAD)
            while held._commit & 3 != 1:
                connection.flow.transport.write(b"1\r\n:\r\n")
            held.put(b"data", 1, 4)
            held.close()
            words = table.words
            table.words = Stores(words, lambda: totals.extend(each.total for each in table.records()))  # type: ignore[assignment]
        assert totals[:2] == [0, 0]


@pytest.mark.parametrize(
    ("pieces", "is_over"), [((HEAD,), False), ((HEAD, END), True), ((PLAIN_HEAD,), True), ((), False)]
)
async def test_when_a_response_is_over(pieces: tuple[bytes, ...], is_over: bool) -> None:
    table = HeldTable(1)
    async with connected() as connection:
        held = connection.begin(table)
        for piece in pieces:
            connection.flow.transport.write(piece)
        assert only(table.records()).past.is_over is is_over
        held.close()
        assert connection.flow.transport is connection.transport
        assert table.num_held == is_over  # until the next turn of the event loop, after which the kernel has it
        await asyncio.sleep(0)
        assert table.num_held == 0


@pytest.mark.parametrize("is_last", [False, True])
async def test_a_response_is_held_until_the_kernel_has_its_end(is_last: bool) -> None:
    """Also where its connection is to be closed, which waits for that too."""
    table = HeldTable(1)
    async with connected() as connection:
        held = connection.begin(table)
        connection.flow.transport.write(HEAD)
        size = 0
        while not connection.transport.get_write_buffer_size():
            connection.flow.transport.write(b"z" * MOST_AT_ONCE)
            size += MOST_AT_ONCE
            await asyncio.sleep(0)
        connection.flow.transport.write(END)
        held.close()
        if is_last:
            connection.transport.close()
        await asyncio.sleep(0)
        record = only(table.records())
        missing = record.missing(num_taken(record.descriptor))
        assert missing is not None
        assert missing.endswith(b"z" + END)
        async with asyncio.timeout(SOON):
            while table.num_held:
                with contextlib.suppress(BlockingIOError):
                    connection.client.recv(1 << 20)
                await asyncio.sleep(0.001)


async def test_the_end_of_the_connection_is_no_byte_of_its_last_response() -> None:
    """Although the kernel counts it as one: the client would lose what is on its way."""
    table = HeldTable(1)
    async with connected() as connection:
        connection.begin(table)
        connection.flow.transport.write(PLAIN_HEAD)
        connection.transport.write_eof()
        record = only(table.records())
        assert record.missing(num_taken(record.descriptor)) == b""


async def test_a_response_that_has_ended_names_no_request_of_its_slot() -> None:
    """As that of a client that has left while its request was read: the slot is another connection's."""
    table = HeldTable(1)
    async with connected() as left, connected() as connection:
        ended = left.begin(table)
        ended.close()
        connection.begin(table)
        record = only(table.records())
        ended.name(ID, [0])
        assert only(table.records()) == record


async def test_what_was_given_away_is_given_to_no_other() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        held = connection.begin(table)
        table.mark_given(only(table.records()).slot)
        assert list(table.records()) == []
        held.close()
        connection.begin(table)
        assert only(table.records()).past.state == 0


async def test_a_response_to_what_has_arrived_is_made_once_more_or_ends() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        held = hold_arrival(table, connection.flow, b"POST /a HTTP/1.1", 0)
        assert held is not None
        assert held.arrive(b"\r\nhost: here\r\n\r\n")
        record = only(table.records())
        assert record.past.request == b"POST /a HTTP/1.1\r\nhost: here\r\n\r\n"
        assert not held.arrive(b"x" * MOST_REQUEST_BYTES)
        again = PastResponse(record.past.request, state=ARRIVED)
        assert record.rest(record.base) == again
        connection.flow.transport.write(HEAD)
        record = only(table.records())
        assert record.rest(record.base) == again  # the client has nothing of it
        assert record.rest(record.base + 1) is None
        assert record.rest(record.base + record.total) is None
        connection.flow.transport.write(END)
        record = only(table.records())
        rest = record.rest(record.base + 1)
        assert rest is not None
        assert (rest.is_over, rest.tail) == (True, (HEAD + END)[1:])
        held.close()
        await asyncio.sleep(0)
        assert not held.arrive(b"late")
        held = hold_arrival(table, connection.flow, b"GET / HTTP/1.1\r\nhost: here\r\n\r\n", 0)
        assert held is not None
        held.know()
        connection.flow.transport.write(HEAD)
        record = only(table.records())
        rest = record.rest(record.base + record.total)
        assert rest is not None
        assert rest.has_begun


@pytest.mark.parametrize("size", [5, MOST_AT_ONCE, RING_BYTES - MOST_AT_ONCE])
async def test_a_tail_is_stored_from_the_beginning(size: int) -> None:
    """So that a second gateway that is killed before the kernel has taken it loses nothing."""
    table, tail = HeldTable(1), bytes(range(250)) * (size // 250 + 1)
    past = PastResponse(b"the request", tail[:size], BEGUN | CHUNKED | NAMED, ID, 7, (OutputEntry(True, False, 9, 9),))
    async with connected() as connection:
        held = hold_response(table, connection.flow, connection.exchange(), b"", 0, past)
        assert held is not None
        record = only(table.records())
        assert record.missing(num_taken(record.descriptor)) == past.tail
        assert (record.past.entries, record.past.request_id) == (past.entries, ID)
        connection.transport.write(past.tail)
        record = only(table.records())
        assert record.missing(record.base) == past.tail
        connection.flow.transport.write(b"2\r\n{}\r\n")
        record = only(table.records())
        assert record.missing(record.base + size) == b"2\r\n{}\r\n"


async def test_the_number_of_the_next_event_stands_in_the_bytes() -> None:
    """No text looks like it, and a second gateway that is killed before it has written an event knows it too."""
    table, events = HeldTable(1), Events()
    async with connected() as connection:
        held = connection.begin(table)
        held.name(ID, [0])
        connection.flow.transport.write(HEAD)
        assert _rest(table).number == 0
        held.advance(0, 0, 0, 1)
        connection.flow.transport.write(events.event("response.created", response={}))
        text = '\ndata: {"type":"response.output_text.delta","sequence_number":77,'
        held.put(events.event("response.output_text.delta", delta=text), 1, len(text))
        held.put(b": keep-alive\n\n", 0, 0)
        past = _rest(table)
        assert past.number == 2
        held.close()
    async with connected() as connection:
        assert hold_response(table, connection.flow, connection.exchange(), b"", 0, past) is not None
        assert _rest(table).number == 2


def _rest(table: HeldTable) -> PastResponse:
    record = only(table.records())
    past = record.rest(num_taken(record.descriptor))
    assert past is not None
    return past


async def test_that_more_was_read_counts_at_once_and_without_what_is_not_written() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        held = connection.begin(table)
        held.name(ID, [0])
        connection.flow.transport.write(HEAD)
        held.advance(0, 3, 11, 1)  # of a piece that waits for the client
        held.mark_followed()
        record = only(table.records())
        assert record.past.state & FOLLOWED
        assert record.past.entries == (OutputEntry(),)
        held.close()
        connection.begin(table)
        assert not only(table.records()).past.state & FOLLOWED


async def test_the_head_of_a_large_whole_answer_is_not_all_of_it() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        connection.begin(table)
        connection.flow.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n")
        record = only(table.records())
        assert (record.past.has_begun, record.past.is_over) == (False, False)
        assert record.missing(num_taken(record.descriptor)) is None  # the client has a head whose body is not stored


async def test_a_request_for_which_there_is_no_descriptor_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    table = HeldTable(1)
    monkeypatch.setattr(os, "memfd_create", full)
    async with connected() as connection:
        assert hold_response(table, connection.flow, connection.exchange(host="here"), b"x" * (20 << 10), 0) is None
        assert table.num_held == 0


async def test_the_response_to_a_client_that_has_left_is_not_held() -> None:
    table = HeldTable(1)
    async with connected() as connection:
        connection.transport.abort()
        for _ in range(3):
            assert hold_response(table, connection.flow, connection.exchange(host="here"), b"{}", 0) is None
            assert table.num_held == 0
            await asyncio.sleep(0)
