"""The table of the responses that a gateway writes: memory that it shares with the holder of its connections, and that
outlives it.

Each response has a slot for its request, the bytes that were written last, and how much of each output they cover. This
module has the layout of a slot, and reads it; :class:`.held_response.HeldResponse` writes it. Both count from the store
of one number on, so the slot is right at whichever instruction the gateway is killed.
"""

import mmap
import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .tcp_counters import cookie_of, is_established, local_port, num_read, num_taken

MAX_HELD = 1024
"""Responses that are held at the same time; further ones end with their gateway."""
MOST_BUFFERED = 16 << 10
"""A response waits for its client while this process has more bytes of it that the kernel has not taken."""
MOST_AT_ONCE = 16 << 10
"""Bytes of a piece of a response in the ring. A larger piece is stored in a file in memory of its own."""
RING_BYTES = MOST_BUFFERED + 2 * MOST_AT_ONCE
"""What was written last. A piece that was stored in part, when the gateway was killed, takes the place of the oldest
bytes; what the kernel has not taken is among the others."""
MOST_LEFT = RING_BYTES - MOST_AT_ONCE
REQUEST_BYTES = 14 << 10
"""Of a request in its slot. What is behind is stored in a file in memory of its own."""
MOST_REQUEST_BYTES = 1 << 20
"""The response to a larger request is not held; of one with a larger piece, neither this piece nor the rest is."""
MOST_FILE_BYTES = 64 << 20
"""Of all requests and pieces in files of their own. Requests that arrive add none beyond half of it."""
MOST_OUTPUTS = 64

BEGUN, CHUNKED, NAMED, SHAPED, ENDED, FOLLOWED, ARRIVED = 1, 2, 4, 8, 16, 32, 64
"""States of a response, added up: its head was written, its body is in chunks, its request has an id, the events before
any output were written, its last byte was written, the connection ends with it, as where more was read from the client,
which is lost, and no more is known than what has arrived of the request: the response can be made once more, but not
continued."""

FIXED = struct.Struct("@QQQqii")
"""Cookie, base, bytes of the request, those that were read of the connection before it, descriptor, file of the request
or -1. They stay until the slot is free, but for the request that arrives."""
FixedFields = tuple[int, int, int, int, int, int]
FILE = struct.Struct("@i")
NAME = struct.Struct("@II40sI")
"""Time, outputs, id of the request, number of the first event that is stored here."""
BANKS = [struct.Struct(f"@{4 + count}Q") for count in range(MOST_OUTPUTS + 1)]
"""Length and state of the response, the descriptor of the file of its last large piece, plus 1, and where that ends (0,
0: there is none), and a word for each output. There are two banks; the number that is stored last is odd if the second
one counts."""
FIXED_AT, NAME_AT, GIVEN_AT, FOLLOWED_AT, SINCE_AT, BANKS_AT = 8, 48, 104, 112, 120, 128
BANK_BYTES = 32 + 8 * MOST_OUTPUTS
SINCE_BYTES, SINCE_TOKENS, SINCE_CHARS = 2, 18, 38
"""Where they begin in the word of what was added to a response of one output since a bank was stored: bytes, tokens and
characters. Its lowest bits are those of the bank's number: where they are not, nothing was added to that bank."""
LENGTH_AT, FILE_AT = FIXED_AT + 16, FIXED_AT + 36
BEHIND, STORED_BEHIND = 1, 2
"""What was read behind the request: bytes that are lost with the gateway, or some that are stored with the request. The
latter are read again with it while the response has not begun."""
REQUEST_AT = 2 << 10
RING_AT = REQUEST_AT + REQUEST_BYTES
SLOT_BYTES = RING_AT + RING_BYTES
_PAIR = struct.Struct("@QQ")
_NUMBERED = re.compile(rb'\ndata: {"type":"[a-z_.]*","sequence_number":([0-9]{1,9})[,}]')
"""In an event of the Responses API. A line feed within a text is escaped there, so that no text has these bytes."""
_MOST_IDLE = 1 << 16
"""Connections with a higher descriptor end with their gateway where no request is in work."""
_GIVEN = (1 << 64) - 1
"""Stands for the bytes of a connection that was given away, of which no other gateway may read on."""
INBOX_BYTES = 256 << 10
"""What is read of a connection at once."""
_INBOX_AT = 16


def bytes_since(since: int) -> int:
    return since >> SINCE_BYTES & (1 << SINCE_TOKENS - SINCE_BYTES) - 1


def word_since(word: int, since: int) -> int:
    """Return a word of an :class:`OutputEntry` with what was added."""
    num_tokens = since >> SINCE_TOKENS & (1 << SINCE_CHARS - SINCE_TOKENS) - 1
    return word + (num_tokens << 2) + (since >> SINCE_CHARS << 33)


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
        number: Of the event behind the tail, where events are numbered from 0 on.
    """

    request: bytes
    tail: bytes = b""
    state: int = 0
    request_id: str = ""
    created: int = 0
    entries: tuple[OutputEntry, ...] = ()
    number: int = 0

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
        num_read: Bytes of the connection that were read up to the end of the stored request.
        files: Descriptors of what the slot does not hold itself.
    """

    slot: int
    descriptor: int
    cookie: int
    base: int
    total: int
    last: bytes
    past: PastResponse
    num_read: int = 0
    files: frozenset[int] = frozenset()

    def read_on(self, data: bytes | None) -> "HeldRecord":
        """Return what the slot would say if ``data`` had been stored, which was read behind it; None: that is lost."""
        past = self.past
        if data and not past.is_known and not past.has_begun:
            return replace(self, past=replace(past, request=past.request + data))
        # As what was read behind a request is noted: no gateway answers it.
        return self if data == b"" else replace(self, past=replace(past, state=past.state | FOLLOWED))

    def rest(self, num_taken: int) -> PastResponse | None:
        """Return the response with the bytes that the kernel has not taken, as another gateway goes on with it; None if
        none can. ``num_taken``: bytes that the kernel has taken from the connection."""
        tail, past = self.missing(num_taken), self.past
        if tail is None or past.is_known or past.is_over:
            return None if tail is None else replace(past, tail=tail, number=_next_number(self.last, past.number))
        # The next gateway makes all of it, and the client must have nothing of another making.
        return PastResponse(past.request, state=ARRIVED | past.state & FOLLOWED) if num_taken == self.base else None

    def missing(self, num_taken: int) -> bytes | None:
        """Return the bytes that the kernel has not taken; None if it has others than the stored ones.

        ``num_taken``: bytes that it has taken from the connection.
        """
        num_left = self.base + self.total - num_taken
        if num_left == -1 and self.past.is_over:  # the kernel counts the end of what is sent as a byte
            num_left = 0
        return self.last[len(self.last) - num_left :] if 0 <= num_left <= len(self.last) else None


class HeldTable:
    """The slots, which connections have no request in work, and what is being read. Processes that are forked from this
    one share all of it.

    Attributes:
        port: At which the gateway accepts connections; 0: none is known.
        inbox: Where the kernel puts what is read: until it is stored, a holder finds it here.
    """

    def __init__(self, num_slots: int = MAX_HELD) -> None:
        self.memory = mmap.mmap(-1, max(num_slots, 1) * SLOT_BYTES)
        self.words = memoryview(self.memory).cast("Q")
        # The port, and by descriptor the cookie of a connection and how many of its bytes were of ended requests.
        self._idle = memoryview(mmap.mmap(-1, 16 * (_MOST_IDLE + 1))).cast("Q")
        # What is being read: the cookie of the connection or 0, the bytes that were read of it before, and what comes.
        self._inbox = mmap.mmap(-1, _INBOX_AT + INBOX_BYTES)
        self._reading = memoryview(self._inbox)[:_INBOX_AT].cast("Q")
        self.inbox = memoryview(self._inbox)[_INBOX_AT:]
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # the one that was used last is next: its pages exist
        self._num_arriving = 0
        self._file_bytes = 0

    @property
    def num_held(self) -> int:
        """Responses that have a slot."""
        return self._num_slots - len(self._free)

    @property
    def file_bytes(self) -> int:
        """Of requests and pieces that have files of their own."""
        return self._file_bytes

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

    def note_given(self, descriptor: int) -> None:
        """Note that a connection without a request is given to a gateway: whatever happens then, no second one gets
        it."""
        self.note_idle(descriptor, cookie_of(descriptor), _GIVEN)

    def waiting(self, descriptor: int) -> bytes | None:
        """Return what was read of the next request of a client's connection of which all others have ended, so that
        another gateway may read on; None for other descriptors. Called once the gateway has ended."""
        try:
            if not is_established(descriptor):
                return None
            known = self._idle[2 * descriptor + 2 : 2 * descriptor + 4] if descriptor < _MOST_IDLE else (0, 0)
            cookie = cookie_of(descriptor)
            if known[0] == cookie:
                return self.unstored(descriptor, cookie, known[1])
            return self.unstored(descriptor, cookie, 0) if local_port(descriptor) == self.port else None
        except OSError:  # no socket, or none of this kind
            return None

    def begin_reading(self, cookie: int, num_received: int) -> None:
        """Note whose bytes come into the inbox next, and how many of that connection were read before."""
        self._reading[0] = 0
        self._reading[1] = num_received
        self._reading[0] = cookie

    def end_reading(self) -> None:
        """Note that what was read is stored, or is lost with the gateway."""
        self._reading[0] = 0

    def read(self, size: int) -> bytes:
        """Return what has come into the inbox."""
        return self._inbox[_INBOX_AT : _INBOX_AT + size]

    def unstored(self, descriptor: int, cookie: int, num_stored: int) -> bytes | None:
        """Return what was read of a connection behind so many bytes; None if that is lost. Called once the gateway has
        ended."""
        if not (count := num_read(descriptor) - num_stored):
            return b""
        is_there = 0 < count <= INBOX_BYTES and [*self._reading] == [cookie, num_stored]
        return self.read(count) if is_there else None

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return not self._free

    @property
    def may_arrive(self) -> bool:
        """Whether one more request may have a slot of which only a part has arrived."""
        # Clients send first bytes before their keys are checked: they never take the slots of all others.
        return not self.is_full and 2 * self._num_arriving < self._num_slots

    def begin_arrival(self) -> None:
        """Count one more of the requests that have arrived only in part."""
        self._num_arriving += 1

    def end_arrival(self) -> None:
        """Count one less of the requests that have arrived only in part: it has arrived as a whole, or has ended."""
        self._num_arriving -= 1

    def take(self, connection: socket.socket, request: bytes, num_received: int) -> tuple[int, FixedFields] | None:
        """Store a request in a free slot, which :meth:`free` gives back; None where it is too large, or the connection
        is none whose bytes the kernel counts. ``num_received``: bytes that were read of that, with the request."""
        try:
            descriptor, cookie, base = connection.fileno(), cookie_of(connection), num_taken(connection)
        except OSError:  # a unix socket
            return None
        slot = self._free.pop()
        if (file := self.add(slot, -1, 0, request)) is None:
            self._free.append(slot)
            return None
        return slot, (cookie, base, len(request), num_received - len(request), descriptor, file)

    def add(self, slot: int, file: int, length: int, data: bytes, most: int = MOST_FILE_BYTES) -> int | None:
        """Store what follows in a request, of which ``length`` bytes are stored. Return the file that has what is
        behind those in the slot, -1: there is none; None where there is no room. ``file``: that of before. ``most``:
        bytes of all files, with these."""
        fits = max(min(len(data), REQUEST_BYTES - length), 0)
        if len(data) > fits:
            if length + len(data) > MOST_REQUEST_BYTES or self._file_bytes + len(data) - fits > most:
                return None
            opened = self.open_file(data[fits:]) if file < 0 else file
            if opened is None or (file >= 0 and not self._write(file, data[fits:])):
                return None
            file = opened
        start = slot * SLOT_BYTES + REQUEST_AT + length
        self.memory[start : start + fits] = data[:fits]
        return file

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.words[slot * SLOT_BYTES // 8] = 0
        self._free.append(slot)

    def open_file(self, data: bytes) -> int | None:
        """Return the descriptor of a file in memory, which :meth:`close_file` closes; None where there is no room."""
        if len(data) > MOST_REQUEST_BYTES or self._file_bytes + len(data) > MOST_FILE_BYTES:
            return None
        try:
            file = os.memfd_create("tokenloom-held-request")
        except OSError:  # no descriptor is left
            return None
        if self._write(file, data):
            return file
        self.close_file(file)
        return None

    def _write(self, file: int, data: bytes) -> bool:
        """Write to the end of a file; return whether there was memory for all of it."""
        try:
            written = os.write(file, data)
        except OSError:
            return False
        self._file_bytes += written
        return written == len(data)

    def close_file(self, file: int) -> None:
        """Close a file that :meth:`open_file` has opened."""
        self._file_bytes -= os.fstat(file).st_size
        os.close(file)

    def records(self) -> Iterator[HeldRecord]:
        """Yield the responses that no one was given, once the gateway has ended."""
        for slot in range(self._num_slots):
            at = slot * SLOT_BYTES
            if (commit := self.words[at // 8]) and not self.words[(at + GIVEN_AT) // 8]:
                yield self._record(slot, commit)

    def mark_given(self, slot: int) -> None:
        """Note that a response is given to a gateway: whatever happens then, it is given to no second one."""
        self.words[(slot * SLOT_BYTES + GIVEN_AT) // 8] = 1

    def _record(self, slot: int, commit: int) -> HeldRecord:
        at, memory = slot * SLOT_BYTES, self.memory
        cookie, base, length, before, descriptor, file = FIXED.unpack_from(memory, at + FIXED_AT)
        created, num_outputs, name, number = NAME.unpack_from(memory, at + NAME_AT)
        bank = BANKS[num_outputs].unpack_from(memory, at + BANKS_AT + (commit & 1) * BANK_BYTES)
        total, state, large, large_end, *entries = bank
        since = self.words[(at + SINCE_AT) // 8]
        if since & 3 == commit & 3 and since > 3:
            total, entries[0] = total + bytes_since(since), word_since(entries[0], since)
        followed = self.words[(at + FOLLOWED_AT) // 8]
        if followed == BEHIND or (followed == STORED_BEHIND and state & BEGUN):
            state |= FOLLOWED
        request = memory[at + REQUEST_AT : at + REQUEST_AT + min(length, REQUEST_BYTES)]
        if length > REQUEST_BYTES:
            request += os.pread(file, length - REQUEST_BYTES, 0)
        last = last_bytes(memory[at + RING_AT : at + SLOT_BYTES], total, large - 1, large_end)
        is_named = bool(state & NAMED)
        past = PastResponse(
            request,
            state=state,
            request_id=name.decode() if is_named else "",
            created=created,
            entries=tuple(map(OutputEntry.of, entries)) if is_named else (),
            number=number,
        )
        files = frozenset(each for each in (file, large - 1) if each >= 0)
        return HeldRecord(slot, descriptor, cookie, base, total, last, past, before + length, files)


def last_bytes(ring: bytes, total: int, large: int, large_end: int) -> bytes:
    """Return the bytes that are stored of a response, up to the last one. ``large``: the file of its last large piece,
    which ends at ``large_end``; -1: none."""
    end, num_behind = total % RING_BYTES, total - large_end
    last = ring[:total] if total < RING_BYTES else ring[end:] + ring[:end]
    if large < 0 or num_behind >= MOST_LEFT:
        return last[-MOST_LEFT:]
    return os.pread(large, os.fstat(large).st_size, 0) + last[len(last) - num_behind :]


def _next_number(data: bytes, first: int) -> int:
    """Return the number of the event behind some bytes of a response. ``first``: that of the first event in them."""
    # The numbers stand in the bytes, so that a token costs nothing more: the last piece that has one is stored whole.
    *_, last = (None, *_NUMBERED.finditer(data))
    return first if last is None else int(last[1]) + 1
