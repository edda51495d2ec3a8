"""Describes where a leg was placed, and serializes it. Says which picks no engine has acknowledged in time. No I/O."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from tokenloom.request.errors import TokenloomError
from tokenloom.request.wire_errors import to_proto
from tokenloom.v1.coordinator_pb2 import EngineIdentity, PickResponse, PickResult, PickResults
from tokenloom.v1.engine_pb2 import PickId, SessionTurn

# Tags of the fields that are written here; a test compares the bytes with those of the messages.
_RESULT, _RESPONSE, _PICK, _SESSION = b"\x0a", b"\x0a", b"\x1a", b"\x22"
_WHOLE = b"\x10\x01"
_EPOCH, _NUMBER = b"\x09", b"\x10"
_EPOCH_BYTES = 8


class Placed(NamedTuple):
    """Names the engine that takes a leg.

    Attributes:
        engine: It.
        engine_part: The engine as a part of a serialized ``PickResponse``, of :func:`engine_part`.
        whole_request: Whether it does the whole request.
        epoch: Incarnation of the coordinator.
        number: Of the pick.
        session: Which turn of which session the leg belongs to; None: of none that is known.
    """

    engine: EngineIdentity
    engine_part: bytes
    whole_request: bool
    epoch: int
    number: int
    session: SessionTurn | None = None

    @property
    def pick(self) -> PickId:
        """What the engine reports when the request has arrived."""
        return PickId(coordinator_epoch=self.epoch, number=self.number)

    def response(self) -> PickResponse:
        """Return the answer to a pick that comes alone."""
        return PickResponse(engine=self.engine, whole_request=self.whole_request, pick=self.pick, session=self.session)

    def part(self) -> bytes:
        """Return the answer as a part of a serialized ``PickResults``.

        Parts that are joined make the message. An engine is serialized when it joins, not copied into two messages and
        serialized there for each pick.
        """
        pick = _EPOCH + self.epoch.to_bytes(_EPOCH_BYTES, "little") + _NUMBER + _varint(self.number)
        whole = _WHOLE if self.whole_request else b""
        response = self.engine_part + whole + _PICK + _varint(len(pick)) + pick
        if self.session is not None:
            session = self.session.SerializeToString()
            response += _SESSION + _varint(len(session)) + session
        result = _RESPONSE + _varint(len(response)) + response
        return _RESULT + _varint(len(result)) + result


def engine_part(engine: EngineIdentity) -> bytes:
    """Return an engine as a part of a serialized ``PickResponse``."""
    return PickResponse(engine=engine).SerializeToString()


def error_part(error: TokenloomError) -> bytes:
    """Return the refusal of a pick as a part of a serialized ``PickResults``."""
    return PickResults(result=[PickResult(error=to_proto(error))]).SerializeToString()


def _varint(value: int) -> bytes:
    """Return a number as Protocol Buffers write it: seven bits in each byte, the lowest first."""
    if value < 1 << 7:
        return bytes((value,))
    if value < 1 << 14:
        return bytes((value & 127 | 128, value >> 7))
    return bytes((value & 127 | 128,)) + _varint(value >> 7)


class ExpiringPicks:
    """Keeps when picks expire, in the order of their numbers, which grow by one from 1 on.

    It makes no object for a pick: at 10,000 picks a second that live for two seconds, the garbage collector would walk
    them all and hold up the answers to others for as long.
    """

    def __init__(self) -> None:
        # As many as are picked within the time that a pick is valid.
        self._times: deque[float] = deque()
        self._rows: deque[int] = deque()
        self._first = 1

    def add(self, expires_at: float, row: int) -> None:
        """Append the next pick, of the engine in ``row``. Times must not fall."""
        self._times.append(expires_at)
        self._rows.append(row)

    def expire(self, now: float) -> Iterator[tuple[int, int]]:
        """Remove the picks whose time has come; yield the number of each and the row of its engine."""
        while self._times and self._times[0] <= now:
            self._times.popleft()
            self._first += 1
            yield self._first - 1, self._rows.popleft()
