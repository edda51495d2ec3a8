"""The ids of a stream's events: where in its answer the stream continues after an event, for ``Last-Event-ID``.

The id of an event says how much of each output the client has, or which number the event has. In an API with one output
and without token ids, an answer that is shaped once more has the same events, so that they can be counted.
"""

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tokenloom.request.errors import InvalidArgument, RequestLost

from ..generation.delivered import TextPieces
from ..mesh.collector import Delta
from ..records.request_ids import ClientPosition, is_request_id

if TYPE_CHECKING:
    from ..http.held_response import HeldResponse

MAX_OUTPUTS = 64
"""Events of answers with more outputs have no ids, which would be longer than the events."""
NO_EVENT = ("", "0")
"""What a client sends for ``Last-Event-ID`` before it has an event, to ask for ids."""
FIELD = "Last-Event-ID"


class IdKind(enum.Enum):
    """What the ids of an API's events say."""

    NONE = enum.auto()
    """There are no ids: its streams cannot be resumed."""
    POSITION = enum.auto()
    NUMBER = enum.auto()


CONTENT_ENDED, FINISHED, USAGE_SENT = "e", "f", "u"
_MAX_LENGTH = 4096
MANY_CHARS = 1024
"""A delta with more text takes long to cut into events."""
_VALUES_PER_PIECE = 64
"""Log probabilities that take as long to shape as a piece, about."""
_END = b"\n\n"
"""Ends an event."""
_ENTRY = re.compile(r"([0-9]{1,9})-([0-9]{1,9})([ef]?)")
_NUMBERED = re.compile(r"n([0-9]{1,9})-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class EventId:
    """What a client has of a streamed answer."""

    request_id: str
    created: int
    """Time of the answer's beginning, in seconds since the epoch."""
    entries: Mapping[int, str] = field(default_factory=dict)
    """By output that has begun: tokens, characters, and whether its content or all of it has ended."""
    usage_sent: bool = False
    number: int = 0
    """Of the next event, in an API whose events are numbered from 0 on, for what another gateway has written."""

    @property
    def positions(self) -> dict[int, ClientPosition]:
        """By output that has begun."""
        positions = {}
        for index, entry in self.entries.items():
            match = _ENTRY.fullmatch(entry)
            assert match is not None
            positions[index] = ClientPosition(int(match[1]), int(match[2]), finished=match[3] == FINISHED)
        return positions


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """What a client has of a streamed answer whose events are numbered."""

    request_id: str = ""
    """Empty: the client has nothing, and asks for ids."""
    created: int = 0
    """Time of the answer's beginning, in seconds since the epoch."""
    number: int = 0
    """Events."""
    num_tokens: int = 0
    """Output tokens that had arrived with the last of them."""


def parse_numbered_id(text: str) -> NumberedEvent:
    """Return what the id of a numbered event says. Raises ``InvalidArgument``."""
    parts = text.split(".") if len(text) <= _MAX_LENGTH else []
    match = _NUMBERED.fullmatch(parts[2]) if len(parts) == 3 else None
    if match is not None and is_request_id(parts[0]) and re.fullmatch("[0-9a-f]{1,9}", parts[1]):
        return NumberedEvent(parts[0], int(parts[1], 16), int(match[1]), int(match[2]))
    raise InvalidArgument(f"{FIELD} is not the id of an event of this API; send 0 to begin a stream", FIELD)


def parse_event_id(text: str) -> EventId:
    """Return what an id says. Raises ``InvalidArgument`` for what is no id of this gateway's events."""
    parts = text.split(".") if len(text) <= _MAX_LENGTH else []
    is_last = len(parts) == 4 and parts[3] == USAGE_SENT
    if len(parts) == 3 + is_last and is_request_id(parts[0]) and re.fullmatch("[0-9a-f]{1,9}", parts[1]):
        entries = parts[2].split("_")
        if len(entries) <= MAX_OUTPUTS and all(not entry or _ENTRY.fullmatch(entry) for entry in entries):
            begun = {index: entry for index, entry in enumerate(entries) if entry}
            return EventId(parts[0], int(parts[1], 16), begun, is_last)
    raise InvalidArgument(f"{FIELD} is not the id of an event of this API; send 0 to begin a stream", FIELD)


class EventIds:
    """Makes the ids of one answer's events."""

    def __init__(self, request_id: str, created: int, num_outputs: int) -> None:
        self._head = f"{request_id}.{created:x}.".encode()
        self._entries = [b""] * num_outputs
        self._num_tokens = [0] * num_outputs
        self._num_chars = [0] * num_outputs

    def restore(self, event: EventId, index: int) -> None:
        """Count what the client has of an output; also after a part of it was repeated."""
        self._entries[index] = event.entries.get(index, "").encode()

    def advance(self, delta: Delta) -> None:
        """Count output that the next event of its index covers."""
        index = delta.index
        self._num_tokens[index] = delta.token_index + len(delta.token_ids)
        self._num_chars[index] += len(delta.text)

    # Ids are sent on request only: tools such as `vllm bench serve` parse everything between two empty lines as data,
    # and fail at an `id:` line.
    def line(self, index: int, state: str = "") -> bytes:
        """Return the line of an event of one output. ``state``: what has ended with it."""
        return b"id: %b\n" % self.of(index, state)

    def of(self, index: int, state: str = "") -> bytes:
        """Return the id of an event of one output. ``state``: what has ended with it."""
        self._entries[index] = b"%d-%d%b" % (self._num_tokens[index], self._num_chars[index], state.encode())
        return self._head + b"_".join(self._entries)

    def last_line(self) -> bytes:
        """Return the line of the event that holds the usage."""
        return b"id: %b%b.%b\n" % (self._head, b"_".join(self._entries), USAGE_SENT.encode())


class StreamedAnswer(Protocol):
    """Describes what shapes the events of an answer."""

    def first_events(self) -> bytes:
        """Return the events before any output."""

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""

    def last_events(self) -> bytes:
        """Return the events after all output."""

    def keep_alive(self) -> bytes:
        """Return what clients of this API skip."""


class ShapedAnswer(StreamedAnswer, Protocol):
    """Describes what shapes an answer as a stream."""

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client has."""

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`."""

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step."""


class HeldAnswer:
    """Shapes the events of an answer, and says to what stores them how much of each output they cover.

    Attributes:
        answer: Shapes them, for a caller that says so itself.
    """

    def __init__(self, answer: ShapedAnswer, held: "HeldResponse | None", *, has_first: bool) -> None:
        """``has_first``: the client has the events before any output."""
        self.answer = answer
        self._held = held
        self._has_first = has_first
        self.keep_alive, self.last_events = answer.keep_alive, answer.last_events
        self.repeat, self.is_large, self.shape = answer.repeat, answer.is_large, answer.shape

    def first_events(self) -> bytes:
        """Return the events before any output; empty if the client has them."""
        events = self.answer.first_events()
        if self._held is not None:
            self._held.mark_shaped()
        return b"" if self._has_first else events

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""
        num_tokens, num_chars = delta.token_index + len(delta.token_ids), len(delta.text)
        events = self.answer.events(delta)
        if self._held is not None:
            flags = (1 if events else 0) if delta.finished is None else 3
            self._held.advance(delta.index, num_tokens, num_chars, flags)
        return events


class NumberedAnswer:
    """Shapes the events of an answer of one output, numbers them from 1 on, and leaves out those that its client has.

    The whole answer is shaped each time, piece by piece: its parsers need its beginning.
    """

    def __init__(
        self,
        answer: StreamedAnswer,
        request_id: str,
        event: NumberedEvent,
        trust: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Args:
        event: The last one that the client has.
        trust: Called with how many tokens have come once that one is made: it had no more of them.
        """
        self._answer = answer
        self._trust = trust
        self._head = f"id: {request_id}.{event.created:x}.n".encode()
        self._num_received, self._num_made, self._num_tokens = event.number, 0, 0
        self._pieces = TextPieces()
        self._shaped: list[bytes] = []  # of the delta that comes next

    def first_events(self) -> bytes:
        """Return the events before any output."""
        if not self._num_received:
            self._trust(0)
        return self._numbered(self._answer.first_events())

    def events(self, delta: Delta) -> bytes:
        """Return the events of the pieces that are complete with some output; empty when there is nothing to send."""
        if not self._shaped:
            for _ in self.shape(delta):
                pass
        events, self._shaped = b"".join(self._shaped), []
        return events

    def last_events(self) -> bytes:
        """Return the events after all output. Raises ``RequestLost`` if the client has more events than there are."""
        events = self._numbered(self._answer.last_events())
        if self._num_made < self._num_received:
            raise RequestLost("The answer is shorter than what was received of it; send the request again.")
        return events

    def keep_alive(self) -> bytes:
        """Return what clients of this API skip; it has no number."""
        return self._answer.keep_alive()

    def repeat(self, delta: Delta) -> None:
        """Take note of output that the client has."""
        self.events(delta)

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`: a resumed answer comes in one delta."""
        return len(delta.text) > MANY_CHARS

    def shape(self, delta: Delta) -> Iterator[int]:
        """Make the events of a delta, step by step; yield how much work each step was, in log probabilities."""
        self._num_tokens += len(delta.token_ids)
        for piece in self._pieces.cut(delta):
            self._shaped.append(self._numbered(self._answer.events(piece)))
            yield _VALUES_PER_PIECE

    def _numbered(self, events: bytes) -> bytes:
        if not events:
            return b""
        numbered = []
        for event in events.split(_END)[:-1]:  # within an event there is no empty line: its data is JSON
            self._num_made += 1
            if self._num_made == self._num_received:
                self._trust(self._num_tokens)
            if self._num_made > self._num_received:
                numbered.append(b"%b%d-%d\n%b%b" % (self._head, self._num_made, self._num_tokens, event, _END))
        return b"".join(numbered)
