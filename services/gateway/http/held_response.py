"""A response whose connection another gateway takes over if this one is killed: what is written of it is stored first.

It stands in the place of the connection's transport. Each piece is stored in a slot of the table before the kernel gets
it, and the kernel says how many of the bytes it has taken.
"""

import asyncio
from typing import Any, Protocol

from .client_flow import ClientFlow
from .held_table import (
    ARRIVED,
    BANK_BYTES,
    BANKS,
    BANKS_AT,
    BEGUN,
    BEHIND,
    CHUNKED,
    ENDED,
    FILE,
    FILE_AT,
    FIXED,
    FIXED_AT,
    FOLLOWED_AT,
    GIVEN_AT,
    LENGTH_AT,
    MOST_AT_ONCE,
    MOST_BUFFERED,
    MOST_FILE_BYTES,
    MOST_LEFT,
    NAME,
    NAME_AT,
    NAMED,
    REQUEST_BYTES,
    RING_AT,
    RING_BYTES,
    SHAPED,
    SINCE_AT,
    SINCE_BYTES,
    SINCE_CHARS,
    SINCE_TOKENS,
    SLOT_BYTES,
    STORED_BEHIND,
    FixedFields,
    HeldTable,
    PastResponse,
    bytes_since,
    last_bytes,
    word_since,
)

_MOST_SINCE = 128
"""For a piece of so many tokens or characters a bank is stored. A piece has 6 bytes at least, and there is a bank for
each round of the ring, so that fewer for each piece fit the word."""
_IS_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n\r\n"
_BARE = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
"""No other piece ends so: events and lines of JSON end with a line feed alone."""
_LOOK_SECONDS = 0.1


_NOT_REPEATED = frozenset((b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"x-request-id"))


class AskedRequest(Protocol):
    """A request as the parser has read it: see :class:`.http_exchange.HttpExchange`."""

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    request_id: bytes


def request_bytes(asked: AskedRequest, body: bytes | bytearray) -> bytes:
    """Return a request as its client could have sent it; empty for a path that cannot be written as it was read."""
    path, query = asked.path, asked.query
    if not path.isascii() or not path.isprintable() or " " in path or "?" in path or "%" in path:
        return b""
    target = b"%b?%b" % (path.encode(), query) if query else path.encode()
    lines = [b"%b %b HTTP/1.1\r\n" % (asked.method.encode(), target)]
    lines += [b"%b: %b\r\n" % each for each in asked.headers.items() if each[0] not in _NOT_REPEATED]
    lines.append(b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (asked.request_id, len(body)))
    return b"".join((*lines, body))


class HeldResponse:
    """Stores a response. It stands in the place of the connection's transport until the response has ended.

    Attributes:
        past: What another gateway has done of the response; None: it begins here.
        created: When the answer began, in seconds since the epoch; the maker of the answer sets it.
        flow: Of the connection.
    """

    # Between two tokens of a stream other processes run: what is read of this object comes from memory each time.
    __slots__ = (
        "_at",
        "_banks",
        "_commit",
        "_commit_at",
        "_end",
        "_entries",
        "_fixed",
        "_followed_at",
        "_is_closed",
        "_is_free",
        "_is_stored",
        "_large",
        "_large_end",
        "_memory",
        "_pack",
        "_ring",
        "_since",
        "_since_at",
        "_slot",
        "_state",
        "_table",
        "_total",
        "_transport",
        "_words",
        "_write",
        "created",
        "flow",
        "past",
    )

    def __init__(
        self,
        table: HeldTable,
        taken: tuple[int, FixedFields],
        flow: ClientFlow,
        past: PastResponse | None,
    ) -> None:
        """``taken``: what :meth:`HeldTable.take` returned. ``past``: its tail is stored here, and written by the
        caller."""
        self.past = past
        self.created = 0 if past is None else past.created
        self._table = table
        slot, self._fixed = taken
        self._slot = slot
        self._memory, self._words = table.memory, table.words
        at = slot * SLOT_BYTES
        self._ring, self._commit_at = at + RING_AT, at // 8
        self._banks = at + BANKS_AT, at + BANKS_AT + BANK_BYTES
        self._followed_at, self._since_at = (at + FOLLOWED_AT) // 8, (at + SINCE_AT) // 8
        self._words[(at + GIVEN_AT) // 8] = self._words[self._followed_at] = self._words[self._since_at] = 0
        self._total = self._commit = self._since = 0
        self._state = 0
        self._entries: list[int] = []
        self._pack = BANKS[0].pack_into
        self._is_stored = True
        self._large = -1  # the file of the last large piece, and where that ends in the response
        self._large_end = 0
        self._is_closed = self._is_free = False
        self._at = self._end = 0  # where the next piece begins, and the ring ends; 0: a bank is stored for the next one
        self.flow, self._transport = flow, flow.transport
        self._write = self._transport.write
        self._transport.set_write_buffer_limits(high=MOST_BUFFERED)
        FIXED.pack_into(self._memory, at + FIXED_AT, *self._fixed)
        if past is None or not past.is_known:
            self._state = 0 if past is None else past.state
            self._store_name("")
            self._store()
        else:
            # With the positions, which cover it: a second gateway may be killed before the kernel has taken it.
            self._memory[self._ring : self._ring + len(past.tail)] = past.tail
            self._total, self._state = len(past.tail), past.state
            self.name(past.request_id, [entry.word for entry in past.entries])
        flow.transport = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Return what else a transport has."""
        return getattr(self._transport, name)

    def put(self, events: bytes, num_tokens: int, num_chars: int) -> None:
        """Store a piece of the body of a chunked response with one output, then write it. ``num_tokens``,
        ``num_chars``: that it covers."""
        # In one function, and with one word for bytes and positions: it runs for each token.
        piece = b"%x\r\n%b\r\n" % (len(events), events)
        size, at = len(piece), self._at
        end = at + size
        if end > self._end or size > MOST_AT_ONCE or num_tokens >= _MOST_SINCE or num_chars >= _MOST_SINCE:
            self.skip(num_tokens, num_chars)
            self._entries[0] |= 1
            self.write(piece)
            return
        self._memory[at:end] = piece
        self._at = end
        since = self._since = self._since + (
            size << SINCE_BYTES | num_tokens << SINCE_TOKENS | num_chars << SINCE_CHARS
        )
        self._words[self._since_at] = since
        self._write(piece)

    def skip(self, num_tokens: int, num_chars: int) -> None:
        """Note that the next piece covers so many more tokens and characters of the only output."""
        self._settle()
        self._entries[0] += num_tokens << 2 | num_chars << 33

    def write(self, data: bytes) -> None:
        """Store any piece of the response, then write it. One that is too large is not stored, nor is what follows it:
        until the kernel takes bytes that are not stored, the stored ones say all that is needed."""
        size = len(data)
        # The body of a large whole answer follows its head, in pieces that are not stored.
        is_bare = not self._state & BEGUN and data.endswith(_BARE) and _IS_CHUNKED not in data
        if self._is_closed or not self._is_stored:
            self._write(data)
            return
        self._settle()
        before, self._is_stored = self._large, not is_bare and (size <= MOST_AT_ONCE or self._store_large(data))
        if self._is_stored:
            if size <= MOST_AT_ONCE:
                at = self._total % RING_BYTES
                ring, fits = self._ring, min(size, RING_BYTES - at)
                self._memory[ring + at : ring + at + fits] = data[:fits]
                self._memory[ring : ring + size - fits] = data[fits:]
            self._total += size
            if not self._state & BEGUN:
                self._state |= BEGUN | CHUNKED if _IS_CHUNKED in data else BEGUN
            elif self._state & CHUNKED and data.endswith(_LAST_CHUNK):
                self._state |= ENDED
            self._store()
            if self._large != before >= 0:
                self._table.close_file(before)
        self._write(data)

    def _store_large(self, data: bytes) -> bool:
        """Store a piece that is too large for the ring in a file, with those bytes before it that the kernel has not
        taken. Return whether there was room; the file counts with the next bank."""
        num_left = self._transport.get_write_buffer_size()
        ring = self._memory[self._ring : self._ring + RING_BYTES]
        before = last_bytes(ring, self._total, self._large, self._large_end) if num_left else b""
        file = self._table.open_file(before[-num_left:] + data if num_left else data)
        if file is not None:
            self._large, self._large_end = file, self._total + len(data)
        return file is not None

    def name(self, request_id: str, entries: list[int]) -> None:
        """Store the id of the request, and a word for each output: see :attr:`OutputEntry.word`. Does nothing once the
        response has ended, as where its client has left: the slot may be another one's."""
        if self._is_closed:
            return
        self._settle()
        self._entries, self._pack = entries, BANKS[len(entries)].pack_into
        if request_id:
            self._state |= NAMED
        self._store_name(request_id)
        self._store()

    @property
    def is_closed(self) -> bool:
        """Whether the response has ended, or is not stored any more."""
        return self._is_closed

    @property
    def is_free(self) -> bool:
        """Whether its slot was given back: the kernel has all of it, or the rest is stored nowhere."""
        return self._is_free

    @property
    def is_arriving(self) -> bool:
        """Whether no more is stored than what has arrived of the request, and the response has not ended."""
        return bool(self._state & ARRIVED) and not self._is_closed

    def arrive(self, data: bytes) -> bool:
        """Store what follows in the request. Return whether it has room."""
        if self._is_closed:
            return False
        cookie, base, length, before, descriptor, last_file = self._fixed
        file = self._table.add(self._slot, last_file, length, data, MOST_FILE_BYTES // 2)
        if file is None:
            return False
        at, end = self._slot * SLOT_BYTES, length + len(data)
        self._fixed = cookie, base, end, before, descriptor, file
        if file != last_file:
            FILE.pack_into(self._memory, at + FILE_AT, file)
        self._words[(at + LENGTH_AT) // 8] = end  # one word: what was stored in part does not count, nor a file before
        return True

    def know(self) -> None:
        """Note that another gateway can continue the response from now on: the request has arrived as a whole. Call it
        while :attr:`is_arriving`."""
        self._settle()
        self._state &= ~ARRIVED
        self._table.end_arrival()
        self._store()

    def mark_followed(self, *, is_stored: bool = False) -> None:
        """Note that the connection ends with the response, as where the client has sent more than this request.
        ``is_stored``: what it has sent is stored too, unless
        this was called without it."""
        # At once, and in a word of its own: there may be no further piece, and the positions may be ahead of the bytes.
        if not self._is_free and not (is_stored and self._words[self._followed_at]):
            self._words[self._followed_at] = STORED_BEHIND if is_stored else BEHIND

    def mark_shaped(self) -> None:
        """Note that the next piece holds the events before any output."""
        self._settle()
        self._state |= SHAPED

    def advance(self, index: int, num_tokens: int, num_chars: int, flags: int) -> None:
        """Note that the next piece covers an output up to so many tokens, and so many characters more of its text.
        ``flags``: 1 if it has an event of it, and 2 if the output has ended."""
        self._settle()
        word = self._entries[index]
        self._entries[index] = word & 1 | flags | num_tokens << 2 | (word >> 33) + num_chars << 33

    def close(self) -> None:
        """Let go of the response, which has ended: at once, or when the kernel has its last bytes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._settle()
        self.flow.transport = self._transport
        state = self._state
        if self._is_stored and (state & ENDED or state & (BEGUN | CHUNKED) == BEGUN):
            asyncio.get_running_loop().call_soon(self._free_when_taken)
        else:
            self._free()

    def free_if_taken(self) -> bool:
        """Give the slot back, if it is closed, and the kernel has its last bytes or the connection has ended. Return
        whether it has none now."""
        # A transport that is closing still writes what it has.
        if self._is_closed and (self.flow.is_lost or not self._transport.get_write_buffer_size()):
            self._free()
        return self._is_free

    def _free_when_taken(self) -> None:
        if not self.free_if_taken():
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._free_when_taken)

    def _free(self) -> None:
        if self._is_free:
            return
        self._is_free = True
        if self._state & ARRIVED:
            self._table.end_arrival()
        self._table.free(self._slot)
        for file in (self._fixed[-1], self._large):
            if file >= 0:
                self._table.close_file(file)

    def _store_name(self, request_id: str) -> None:
        number = 0 if self.past is None else self.past.number
        fields = self.created, len(self._entries), request_id.encode(), number
        NAME.pack_into(self._memory, self._slot * SLOT_BYTES + NAME_AT, *fields)

    def _settle(self) -> None:
        """Add what was counted since the last bank was stored to what the next one will hold."""
        if (since := self._since) > 3:
            self._total += bytes_since(since)
            self._entries[0] = word_since(self._entries[0], since)
        self._since = self._end = 0

    def _store(self) -> None:
        """Let what was stored count."""
        commit = self._commit = self._commit + 1
        fields = self._total, self._state, self._large + 1, self._large_end
        self._pack(self._memory, self._banks[commit & 1], *fields, *self._entries)
        self._words[self._commit_at] = commit  # one aligned word: a process that is killed has stored it, or not
        self._words[self._since_at] = self._since = commit & 3
        if self._is_stored and self._state & CHUNKED and len(self._entries) == 1 and self._entries[0] & 1:
            self._at, self._end = self._ring + self._total % RING_BYTES, self._ring + RING_BYTES


def hold_response(
    table: HeldTable,
    flow: ClientFlow,
    asked: AskedRequest,
    body: bytes | bytearray,
    num_received: int,
    past: PastResponse | None = None,
) -> HeldResponse | None:
    """Store the response to a request from now on; return None where it cannot be continued elsewhere.

    ``num_received``: bytes that were read of the connection so far. ``past``: what another gateway has done of it.
    """
    if table.is_full or not _can_hold(flow):
        return None
    request = request_bytes(asked, body) if past is None else past.request
    if not request or (past is not None and len(past.tail) > MOST_LEFT):
        return None
    return _hold(table, flow, request, num_received, past)


def hold_arrival(table: HeldTable, flow: ClientFlow, data: bytes, num_received: int) -> HeldResponse | None:
    """Store the first bytes of a request; return None where that cannot be. ``num_received``: bytes that were read of
    the connection, with these."""
    has_room = len(data) <= REQUEST_BYTES or table.file_bytes + len(data) <= MOST_FILE_BYTES // 2
    if not has_room or not table.may_arrive or not _can_hold(flow):
        return None
    if (held := _hold(table, flow, data, num_received, PastResponse(b"", state=ARRIVED))) is not None:
        table.begin_arrival()
    return held


def _hold(
    table: HeldTable, flow: ClientFlow, request: bytes, num_received: int, past: PastResponse | None
) -> HeldResponse | None:
    taken = table.take(flow.transport.get_extra_info("socket"), request, num_received)
    return None if taken is None else HeldResponse(table, taken, flow, past)


def _can_hold(flow: ClientFlow) -> bool:
    transport: object = flow.transport  # which a held response stands in for
    is_busy = isinstance(transport, HeldResponse) or flow.transport.get_write_buffer_size()
    has_left = flow.is_lost or flow.transport.is_closing()  # it has no descriptor then, or not for long
    return not is_busy and not has_left
