"""What outlives a gateway of the responses that it writes: memory that it shares with the holder of its connections.

Each response has a slot for its request, the bytes that were written last, and how much of each output they cover. They
are stored before the kernel gets them, and count from the store of one number on. So the slot is right at whichever
instruction the gateway is killed, and the kernel says how many of the bytes it has taken.
"""

import asyncio
import fcntl
import mmap
import os
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .client_flow import ClientFlow

MAX_HELD = 1024
"""Responses that are held at the same time; further ones end with their gateway."""
MOST_BUFFERED = 16 << 10
"""A response waits for its client while this process has more bytes of it that the kernel has not taken."""
MOST_AT_ONCE = 16 << 10
"""Bytes of a piece of a response. A larger piece is not stored, nor is what follows it."""
RING_BYTES = MOST_BUFFERED + 2 * MOST_AT_ONCE
"""What was written last. A piece that was stored in part, when the gateway was killed, takes the place of the oldest
bytes; what the kernel has not taken is among the others."""
_MOST_LEFT = RING_BYTES - MOST_AT_ONCE
REQUEST_BYTES = 14 << 10
"""A larger request is stored in a file in memory of its own."""
MOST_REQUEST_BYTES = 1 << 20
"""The response to a larger request is not held."""
MOST_FILE_BYTES = 64 << 20
"""Of all requests in files of their own."""
MOST_OUTPUTS = 64

BEGUN, CHUNKED, NAMED, SHAPED, ENDED, FOLLOWED, ARRIVED = 1, 2, 4, 8, 16, 32, 64
"""States of a response, added up: its head was written, its body is in chunks, its request has an id, the events before
any output were written, its last byte was written, the connection ends with it, as where more was read from the client,
which is lost, and no more is known than what has arrived of the request: the response can be made once more, but not
continued."""

_FIXED = struct.Struct("@QQQiiII40s")
"""Cookie, base, bytes of the request, descriptor, file of the request or -1, time, outputs, id of the request."""
_BANKS = [struct.Struct(f"@{2 + count}Q") for count in range(MOST_OUTPUTS + 1)]
"""Length and state of the response, and a word for each output. There are two banks; the number that is stored last is
odd if the second one counts."""
_FIXED_AT, _GIVEN_AT, _FOLLOWED_AT, _SINCE_AT, _BANKS_AT, _BANK_BYTES = 8, 104, 112, 120, 128, 16 + 8 * MOST_OUTPUTS
_SINCE_BYTES, _SINCE_TOKENS, _SINCE_CHARS = 2, 18, 38
"""Where they begin in the word of what was added to a response of one output since a bank was stored: bytes, tokens and
characters. Its lowest bits are those of the bank's number: where they are not, nothing was added to that bank."""
_MOST_SINCE = 128
"""For a piece of so many tokens or characters a bank is stored. A piece has 6 bytes at least, and there is a bank for
each round of the ring, so that fewer for each piece fit the word."""
_LENGTH_AT = _FIXED_AT + 16
_BEHIND, _STORED_BEHIND = 1, 2
"""What was read behind the request: bytes that are lost with the gateway, or some that are stored with the request. The
latter are read again with it while the response has not begun."""
_REQUEST_AT = 2 << 10
_RING_AT = _REQUEST_AT + REQUEST_BYTES
SLOT_BYTES = _RING_AT + RING_BYTES
_PAIR = struct.Struct("@QQ")
_TCP_PROTOCOL = struct.pack("@i", socket.IPPROTO_TCP)
_IS_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n\r\n"
_BARE = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
"""No other piece ends so: events and lines of JSON end with a line feed alone."""
_SO_COOKIE, _ACKED_AT, _RECEIVED_AT, _INFO_BYTES = 57, 120, 128, 136
"""The last three: of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in the kernel's ``tcp_info``, and their end."""
_ESTABLISHED = 1
_MOST_IDLE = 1 << 16
"""Connections with a higher descriptor end with their gateway where no request is in work."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """How much of one output the bytes of a response cover.

    Attributes:
        has_begun: Whether there is an event of the output.
        num_chars: Of the text, before it was parsed.
    """

    has_begun: bool = False
    is_finished: bool = False
    num_tokens: int = 0
    num_chars: int = 0

    @classmethod
    def of(cls, word: int) -> "OutputEntry":
        return cls(bool(word & 1), bool(word & 2), word >> 2 & 0x7FFFFFFF, word >> 33)

    @property
    def word(self) -> int:
        return self.has_begun | self.is_finished << 1 | self.num_tokens << 2 | self.num_chars << 33


@dataclass(frozen=True, slots=True)
class PastResponse:
    """What another gateway has done of a response.

    Attributes:
        request: As the client sent it, with the body as it was decoded from chunks.
        tail: What was stored of the response and the kernel has not taken.
        state: Sum of the states above.
        request_id: The mesh's; empty without :data:`NAMED`.
        created: When the answer began, in seconds since the epoch.
        entries: By output.
    """

    request: bytes
    tail: bytes = b""
    state: int = 0
    request_id: str = ""
    created: int = 0
    entries: tuple[OutputEntry, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether more is known than what has arrived of the request."""
        return not self.state & ARRIVED

    @property
    def has_begun(self) -> bool:
        """Whether the client has, or gets with the tail, the head of the response."""
        return bool(self.state & BEGUN)

    @property
    def has_first(self) -> bool:
        """Whether the same is true of the events before any output."""
        return bool(self.state & SHAPED)

    @property
    def is_over(self) -> bool:
        """Whether nothing follows the tail: a body that is not in chunks was stored with its head."""
        return bool(self.state & ENDED) or self.state & (BEGUN | CHUNKED) == BEGUN


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """What a slot says of a response.

    Attributes:
        slot: Its number.
        descriptor: Of the connection in the gateway.
        cookie: The kernel's name of the connection, which no other socket gets.
        base: Bytes that the kernel had taken from the connection before the response.
        total: Bytes of the response that were stored.
        last: The last of them.
        past: All else; without a tail.
    """

    slot: int
    descriptor: int
    cookie: int
    base: int
    total: int
    last: bytes
    past: PastResponse

    def rest(self, num_taken: int) -> PastResponse | None:
        """Return the response with the bytes that the kernel has not taken, as another gateway goes on with it; None if
        none can. ``num_taken``: bytes that the kernel has taken from the connection."""
        tail, past = self.missing(num_taken), self.past
        if tail is None or past.is_known or past.is_over:
            return None if tail is None else replace(past, tail=tail)
        # The next gateway makes all of it, and the client must have nothing of another making.
        return PastResponse(past.request, state=ARRIVED | past.state & FOLLOWED) if num_taken == self.base else None

    def missing(self, num_taken: int) -> bytes | None:
        """Return the bytes that the kernel has not taken; None if it has others than the stored ones.

        ``num_taken``: bytes that it has taken from the connection.
        """
        num_left = self.base + self.total - num_taken
        return self.last[len(self.last) - num_left :] if 0 <= num_left <= len(self.last) else None


class HeldTable:
    """The slots, and which connections have no request in work. Processes that are forked from this one share both.

    Attributes:
        port: At which the gateway accepts connections; 0: none is known.
    """

    def __init__(self, num_slots: int = MAX_HELD) -> None:
        self.memory = mmap.mmap(-1, max(num_slots, 1) * SLOT_BYTES)
        self.words = memoryview(self.memory).cast("Q")
        # The port, and by descriptor the cookie of a connection and how many of its bytes were of ended requests.
        self._idle = memoryview(mmap.mmap(-1, 16 * (_MOST_IDLE + 1))).cast("Q")
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # the one that was used last is next: its pages exist
        self._num_arriving = 0
        self._file_bytes = 0

    @property
    def num_held(self) -> int:
        """Responses that have a slot."""
        return self._num_slots - len(self._free)

    @property
    def port(self) -> int:
        return self._idle[0]

    @port.setter
    def port(self, port: int) -> None:
        self._idle[0] = port

    def note_idle(self, descriptor: int, cookie: int, num_received: int) -> None:
        """Note that all ``num_received`` bytes that were read from a connection are of requests that have ended."""
        if 0 <= descriptor < _MOST_IDLE:
            self._idle[2 * descriptor + 2 : 2 * descriptor + 4] = memoryview(_PAIR.pack(cookie, num_received)).cast("Q")

    def is_idle(self, descriptor: int) -> bool:
        """Return whether a descriptor is a connection of a client of which nothing was read but requests that have
        ended: another gateway may read on. Called once the gateway has ended."""
        try:
            if _option(descriptor, socket.SOL_SOCKET, socket.SO_PROTOCOL, 4) != _TCP_PROTOCOL:
                return False
            info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            if info[0] != _ESTABLISHED or local_port(descriptor) != self.port:
                return False
            count = num_read(descriptor)
            known = self._idle[2 * descriptor + 2 : 2 * descriptor + 4] if descriptor < _MOST_IDLE else ()
            return not count or list(known) == [cookie_of(descriptor), count]
        except OSError:  # no socket, or none of this kind
            return False

    def arrive(self, flow: ClientFlow, data: bytes) -> "HeldResponse | None":
        """Store the first bytes of a request; return None where that cannot be."""
        # Clients send first bytes before their keys are checked: they never take the slots of all others.
        is_full = not self._free or 2 * self._num_arriving >= self._num_slots
        if is_full or len(data) > REQUEST_BYTES or not self._can_hold(flow):
            return None
        if (held := self._begin(flow, data, PastResponse(b"", state=ARRIVED))) is not None:
            self._num_arriving += 1
        return held

    def end_arrival(self) -> None:
        """Count one less of the requests that have arrived only in part: it has arrived as a whole, or has ended."""
        self._num_arriving -= 1

    def _can_hold(self, flow: ClientFlow) -> bool:
        transport: object = flow.transport  # which a held response stands in for
        is_busy = isinstance(transport, HeldResponse) or flow.transport.get_write_buffer_size()
        has_left = flow.is_lost or flow.transport.is_closing()  # it has no descriptor then, or not for long
        return not is_busy and not has_left

    def begin(
        self, flow: ClientFlow, asked: "AskedRequest", body: bytes | bytearray, past: PastResponse | None = None
    ) -> "HeldResponse | None":
        """Store the response to a request from now on; return None where it cannot be continued elsewhere.

        ``past``: what another gateway has done of it.
        """
        if not self._free or not self._can_hold(flow):
            return None
        request = request_bytes(asked, body) if past is None else past.request
        if past is not None and len(past.tail) > _MOST_LEFT:
            return None
        file_bytes = len(request) if len(request) > REQUEST_BYTES else 0
        if not request or len(request) > MOST_REQUEST_BYTES or self._file_bytes + file_bytes > MOST_FILE_BYTES:
            return None
        return self._begin(flow, request, past)

    def _begin(self, flow: ClientFlow, request: bytes, past: PastResponse | None) -> "HeldResponse | None":
        file_bytes = len(request) if len(request) > REQUEST_BYTES else 0
        connection = flow.transport.get_extra_info("socket")
        try:
            descriptor, cookie, base = connection.fileno(), cookie_of(connection), num_taken(connection)
            file = _file_of(request) if file_bytes else -1
        except OSError:  # a unix socket, or no memory or descriptor is left for a file
            return None
        slot = self._free.pop()
        self._file_bytes += file_bytes
        if not file_bytes:
            start = slot * SLOT_BYTES + _REQUEST_AT
            self.memory[start : start + len(request)] = request
        return HeldResponse(self, slot, flow, (cookie, base, len(request), descriptor, file), past)

    def free(self, slot: int, file_bytes: int) -> None:
        """Give a slot back. ``file_bytes``: of the request, if it has a file of its own."""
        self.words[slot * SLOT_BYTES // 8] = 0
        self._file_bytes -= file_bytes
        self._free.append(slot)

    def records(self) -> Iterator[HeldRecord]:
        """Yield the responses that no one was given, once the gateway has ended."""
        for slot in range(self._num_slots):
            at = slot * SLOT_BYTES
            if (commit := self.words[at // 8]) and not self.words[(at + _GIVEN_AT) // 8]:
                yield self._record(slot, commit)

    def mark_given(self, slot: int) -> None:
        """Note that a response is given to a gateway: whatever happens then, it is given to no second one."""
        self.words[(slot * SLOT_BYTES + _GIVEN_AT) // 8] = 1

    def _record(self, slot: int, commit: int) -> HeldRecord:
        at, memory = slot * SLOT_BYTES, self.memory
        cookie, base, length, descriptor, file, created, num_outputs, name = _FIXED.unpack_from(memory, at + _FIXED_AT)
        bank = _BANKS[num_outputs].unpack_from(memory, at + _BANKS_AT + (commit & 1) * _BANK_BYTES)
        total, state, *entries = bank
        since = self.words[(at + _SINCE_AT) // 8]
        if since & 3 == commit & 3 and since > 3:
            total, entries[0] = total + _bytes_since(since), _word_since(entries[0], since)
        followed = self.words[(at + _FOLLOWED_AT) // 8]
        if followed == _BEHIND or (followed == _STORED_BEHIND and state & BEGUN):
            state |= FOLLOWED
        request = memory[at + _REQUEST_AT : at + _REQUEST_AT + length] if file < 0 else os.pread(file, length, 0)
        ring = memory[at + _RING_AT : at + SLOT_BYTES]
        end = total % RING_BYTES
        last = ring[:total] if total < RING_BYTES else ring[end:] + ring[:end]
        is_named = bool(state & NAMED)
        past = PastResponse(
            request,
            state=state,
            request_id=name.decode() if is_named else "",
            created=created,
            entries=tuple(map(OutputEntry.of, entries)) if is_named else (),
        )
        return HeldRecord(slot, descriptor, cookie, base, total, last[-_MOST_LEFT:], past)


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
        slot: int,
        flow: ClientFlow,
        fixed: tuple[int, int, int, int, int],
        past: PastResponse | None,
    ) -> None:
        """``fixed``: cookie, base, bytes of the request, descriptor, file of the request or -1. ``past``: its tail is
        stored here, and written by the caller."""
        self.past = past
        self.created = 0 if past is None else past.created
        self._table, self._slot, self._fixed = table, slot, fixed
        self._memory, self._words = table.memory, table.words
        at = slot * SLOT_BYTES
        self._ring, self._commit_at = at + _RING_AT, at // 8
        self._banks = at + _BANKS_AT, at + _BANKS_AT + _BANK_BYTES
        self._followed_at, self._since_at = (at + _FOLLOWED_AT) // 8, (at + _SINCE_AT) // 8
        self._words[(at + _GIVEN_AT) // 8] = self._words[self._followed_at] = self._words[self._since_at] = 0
        self._total = self._commit = self._since = 0
        self._state = 0
        self._entries: list[int] = []
        self._pack = _BANKS[0].pack_into
        self._is_stored = True
        self._is_closed = self._is_free = False
        self._at = self._end = 0  # where the next piece begins, and the ring ends; 0: a bank is stored for the next one
        self.flow, self._transport = flow, flow.transport
        self._write = self._transport.write
        self._transport.set_write_buffer_limits(high=MOST_BUFFERED)
        if past is None or not past.is_known:
            self._state = 0 if past is None else past.state
            self._store_fixed("")
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
            size << _SINCE_BYTES | num_tokens << _SINCE_TOKENS | num_chars << _SINCE_CHARS
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
        self._is_stored = self._is_stored and size <= MOST_AT_ONCE and not is_bare
        if self._is_stored and not self._is_closed:
            self._settle()
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
        self._write(data)

    def name(self, request_id: str, entries: list[int]) -> None:
        """Store the id of the request, and a word for each output: see :attr:`OutputEntry.word`."""
        self._settle()
        self._entries, self._pack = entries, _BANKS[len(entries)].pack_into
        if request_id:
            self._state |= NAMED
        self._store_fixed(request_id)
        self._store()

    @property
    def is_arriving(self) -> bool:
        """Whether no more is stored than what has arrived of the request, and the response has not ended."""
        return bool(self._state & ARRIVED) and not self._is_closed

    def arrive(self, data: bytes) -> bool:
        """Store what follows in the request. Return whether it has room."""
        cookie, base, length, *others = self._fixed
        end = length + len(data)
        if self._is_closed or end > REQUEST_BYTES:
            return False
        at = self._slot * SLOT_BYTES
        self._memory[at + _REQUEST_AT + length : at + _REQUEST_AT + end] = data
        self._words[(at + _LENGTH_AT) // 8] = end  # one word: what was stored in part does not count
        self._fixed = cookie, base, end, *others  # type: ignore[assignment]
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
            self._words[self._followed_at] = _STORED_BEHIND if is_stored else _BEHIND

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
        """Give the slot back, if it is closed and the kernel has its last bytes. Return whether it has none now."""
        if self._is_closed and (self._transport.is_closing() or not self._transport.get_write_buffer_size()):
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
        file, size = self._fixed[4], self._fixed[2]
        self._table.free(self._slot, 0 if file < 0 else size)
        if file >= 0:
            os.close(file)

    def _store_fixed(self, request_id: str) -> None:
        fields = (*self._fixed, self.created, len(self._entries), request_id.encode())
        _FIXED.pack_into(self._memory, self._slot * SLOT_BYTES + _FIXED_AT, *fields)

    def _settle(self) -> None:
        """Add what was counted since the last bank was stored to what the next one will hold."""
        if (since := self._since) > 3:
            self._total += _bytes_since(since)
            self._entries[0] = _word_since(self._entries[0], since)
        self._since = self._end = 0

    def _store(self) -> None:
        """Let what was stored count."""
        commit = self._commit = self._commit + 1
        self._pack(self._memory, self._banks[commit & 1], self._total, self._state, *self._entries)
        self._words[self._commit_at] = commit  # one aligned word: a process that is killed has stored it, or not
        self._words[self._since_at] = self._since = commit & 3
        if self._is_stored and self._state & CHUNKED and len(self._entries) == 1 and self._entries[0] & 1:
            self._at, self._end = self._ring + self._total % RING_BYTES, self._ring + RING_BYTES


def _bytes_since(since: int) -> int:
    return since >> _SINCE_BYTES & (1 << _SINCE_TOKENS - _SINCE_BYTES) - 1


def _word_since(word: int, since: int) -> int:
    """Return a word of an :class:`OutputEntry` with what was added."""
    num_tokens = since >> _SINCE_TOKENS & (1 << _SINCE_CHARS - _SINCE_TOKENS) - 1
    return word + (num_tokens << 2) + (since >> _SINCE_CHARS << 33)


class SocketOptions(Protocol):
    """Describes a socket, as a transport shows its own."""

    def fileno(self) -> int: ...

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


Descriptor = int | SocketOptions

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


def cookie_of(descriptor: Descriptor) -> int:
    """Return the kernel's name of a socket. Raises ``OSError``."""
    cookie: int = struct.unpack("@Q", _option(descriptor, socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
    return cookie


def num_taken(descriptor: Descriptor) -> int:
    """Return how many bytes the kernel has taken from a TCP connection: those that its client has acknowledged, and
    those that are still queued. Raises ``OSError``."""
    while True:
        acknowledged = _num_acknowledged(descriptor)
        queued: int = struct.unpack("@i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))[0]
        if acknowledged == _num_acknowledged(descriptor):
            return acknowledged + queued


def num_read(descriptor: int) -> int:
    """Return how many bytes of a TCP connection were read from the kernel. Raises ``OSError``."""
    while True:
        received = _num_received(descriptor)
        unread: int = struct.unpack("@i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
        if received == _num_received(descriptor):
            return received - unread


def _num_received(descriptor: int) -> int:
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    count: int = struct.unpack_from("@Q", info, _RECEIVED_AT)[0]
    return count


def local_port(descriptor: int) -> int:
    """Return the port of a socket. Raises ``OSError``."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        name = connection.getsockname()
    finally:
        connection.detach()
    return int(name[1]) if isinstance(name, tuple) else 0


def _num_acknowledged(descriptor: Descriptor) -> int:
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    count: int = struct.unpack_from("@Q", info, _ACKED_AT)[0]
    return count


def _option(descriptor: Descriptor, level: int, name: int, size: int) -> bytes:
    if not isinstance(descriptor, int):
        return descriptor.getsockopt(level, name, size)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        return connection.getsockopt(level, name, size)
    finally:
        connection.detach()


def _file_of(data: bytes) -> int:
    """Return the descriptor of a file in memory."""
    file = os.memfd_create("tokenloom-held-request")
    try:
        with open(file, "wb", buffering=0, closefd=False) as written:
            written.write(data)
    except OSError:
        os.close(file)
        raise
    return file
