"""The ids of a stream's events: where in its answer the stream continues after an event, for ``Last-Event-ID``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenloom.request.errors import InvalidArgument

from ..mesh.collector import Delta
from ..records.request_ids import ClientPosition, is_request_id

MAX_OUTPUTS = 64
"""Events of answers with more outputs have no ids, which would be longer than the events."""
NO_EVENT = ("", "0")
"""What a client sends for ``Last-Event-ID`` before it has an event, to ask for ids."""
FIELD = "Last-Event-ID"
CONTENT_ENDED, FINISHED, USAGE_SENT = "e", "f", "u"
_MAX_LENGTH = 4096
_ENTRY = re.compile(r"([0-9]{1,9})-([0-9]{1,9})([ef]?)")


@dataclass(frozen=True, slots=True)
class EventId:
    """What a client has of a streamed answer."""

    request_id: str
    created: int
    """Time of the answer's beginning, in seconds since the epoch."""
    entries: Mapping[int, str] = field(default_factory=dict)
    """By output that has begun: tokens, characters, and whether its content or all of it has ended."""
    usage_sent: bool = False

    @property
    def positions(self) -> dict[int, ClientPosition]:
        """By output that has begun."""
        positions = {}
        for index, entry in self.entries.items():
            match = _ENTRY.fullmatch(entry)
            assert match is not None
            positions[index] = ClientPosition(int(match[1]), int(match[2]), finished=match[3] == FINISHED)
        return positions


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
        self._head = f"id: {request_id}.{created:x}.".encode()
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
        self._entries[index] = b"%d-%d%b" % (self._num_tokens[index], self._num_chars[index], state.encode())
        return b"%b%b\n" % (self._head, b"_".join(self._entries))

    def last_line(self) -> bytes:
        """Return the line of the event that holds the usage."""
        return b"%b%b.%b\n" % (self._head, b"_".join(self._entries), USAGE_SENT.encode())
