"""Messages between the ranks of a data-parallel group and its hub, which runs beside rank 0.

They pass over a stream socket: four bytes of length, then msgpack.
"""

import contextlib
import enum
import socket
import struct
import time
from typing import Annotated, Any, Generic, TypeVar

import msgspec

MAX_RANKS = 1 << 16
"""Limit of ranks and of sizes in messages: far beyond any group, and small enough to count up to."""
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Endpoint = Annotated[str, msgspec.Meta(max_length=255)]
_MOST_WORKERS = 1024


class Want(enum.IntEnum):
    """What a rank wants of the wave when it votes."""

    IDLE = 0
    """It has no request that may advance."""
    RUN = 1
    """It has requests that may advance."""
    PAUSED = 2
    """It is paused, and none of its requests may advance. It takes part in a wave that runs, but begins none: it may
    sleep, without weights."""


class VoteVerdict(enum.IntEnum):
    """What the ranks agreed on."""

    RUN = 0
    """All of them compute steps until the next vote."""
    REST = 1
    """The wave is complete: no rank wants to run."""
    HELD = 2
    """The wave does not begin, because a rank is paused. That rank calls for the next one when it resumes."""


class GroupHello(msgspec.Struct, tag="HELLO"):
    """Rank to hub: the first message of a connection."""

    group_id: str
    rank: _Rank
    facts: dict[str, str]
    """Settings and properties of the model that must be equal on all ranks, by name."""
    nonce: bytes = b""
    """Drawn by the rank, for the hub's proof that it knows the group's secret; empty: the rank has no secret."""
    workers: Annotated[list[_Endpoint], msgspec.Meta(max_length=_MOST_WORKERS)] = []
    """Where the other ranks reach each worker of this one; empty: the experts are not spread over the ranks."""
    size: _Count = 0
    """Ranks of the group that this one was a member of when it lost its hub; 0: it is new."""
    wave: _Count = 0
    """The wave that it was at then."""


class Challenge(msgspec.Struct, tag="CHALLENGE"):
    """Hub to rank, if the group has a secret: the hub's proof that it knows it, and a nonce for the rank's."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag="PROOF"):
    """Rank to hub: the answer to a challenge."""

    proof: bytes


class Refused(msgspec.Struct, tag="REFUSED"):
    """Hub to rank: the rank cannot be part of this group.

    Attributes:
        permanent: Whether another attempt would end in the same way.
    """

    reason: str
    permanent: bool


class Accepted(msgspec.Struct, tag="ACCEPTED"):
    """Hub to rank: the rank may become a member; a welcome follows."""


class Roster(msgspec.Struct):
    """The members of a group over which experts are spread, whose workers join each other now.

    Attributes:
        epoch: Each change of the members has its own.
        ranks: The members, in ascending order.
        workers: Where the workers of each member can be reached.
        nonce: From which, with the group's secret if it has one, the key follows by which workers know each other.
    """

    epoch: _Count
    ranks: list[_Rank]
    workers: list[list[_Endpoint]]
    nonce: bytes


class Welcome(msgspec.Struct, tag="WELCOME"):
    """Hub to rank: the rank is a member from now on.

    Attributes:
        wave: The number of the wave that runs, or of the next one.
        step: Steps of that wave that the other ranks have computed.
        runs: Whether the wave runs.
        size: Ranks of the group.
        roster: The members; None: the experts are not spread over them.
    """

    wave: _Count
    step: _Count
    runs: bool
    size: _Size
    roster: Roster | None = None


class Vote(msgspec.Struct, tag="VOTE"):
    """Rank to hub: what the rank wants, after so many steps of this wave.

    Attributes:
        target: Ranks that the group should have; the group changes when all members name the same number.
    """

    wave: _Count
    step: _Count
    want: Want
    target: _Size


class Outcome(msgspec.Struct, tag="OUTCOME"):
    """Hub to rank: the result of the vote with this wave and step.

    Attributes:
        size: Ranks of the group from now on; members of higher ranks are removed.
        roster: The members from now on, if they have changed and the experts are spread over them.
    """

    wave: _Count
    step: _Count
    verdict: VoteVerdict
    size: _Size
    roster: Roster | None = None


class Lost(msgspec.Struct, tag="LOST"):
    """Hub to rank: the members have lost one of them, or their connections to each other. Votes that were cast do not
    count, steps that wait for another member are lost, and all rest at the begin of the same wave.

    Attributes:
        wave: The next wave.
        size: Ranks of the group; the lost one may come again.
        roster: The members that are left, if the experts are spread over them.
    """

    wave: _Count
    size: _Size
    roster: Roster | None = None


class Ended(msgspec.Struct, tag="ENDED"):
    """Hub to rank: rank 0 ends as it was asked to, and its hub with it."""


class Broken(msgspec.Struct, tag="BROKEN"):
    """Rank to hub: a worker of this rank cannot reach the workers of another one.

    Attributes:
        epoch: Of the roster by which they have joined.
    """

    epoch: _Count


class Newcomers(msgspec.Struct, tag="NEWCOMERS"):
    """Hub to rank: these ranks have loaded their weights and wait to become members (vLLM's notification
    NEW_CORE_ENGINES_WEIGHTS_INIT_READY)."""

    ranks: list[_Rank]


class Called(msgspec.Struct, tag="CALLED"):
    """Hub to rank: another rank has begun this wave, and waits for the votes of all."""

    wave: _Count


ToHub = GroupHello | Proof | Vote | Broken
ToRank = Challenge | Accepted | Refused | Welcome | Called | Outcome | Newcomers | Lost | Ended

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20


class Frames(Generic[T]):
    """The messages of one connection. One thread reads; the owner makes sure that one thread writes at a time."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._connection = connection
        self._decoder = decoder
        self._seconds: float | None = None

    def send(self, message: object) -> None:
        """Send a message. Raises ``OSError`` if the connection has ended, or if the peer reads nothing."""
        body = msgspec.msgpack.encode(message)
        self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> T:
        """Wait for a message. Raises ``OSError`` if the connection ends, or if the peer speaks another language."""
        ends_at = None if self._seconds is None else time.monotonic() + self._seconds
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, ends_at))
        if length > _MAX_BYTES:
            raise ConnectionError(f"a message of {length} bytes; it may have {_MAX_BYTES}")
        try:
            return self._decoder.decode(self._read(length, ends_at))
        # msgspec does not convert the errors of broken text, and of lists within lists within lists.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConnectionError(f"a message that is none of a data-parallel group: {error}") from None

    def limit(self, seconds: float | None) -> None:
        """Let receiving a whole message, or a write, end with ``TimeoutError`` after these seconds; None: they wait."""
        self._seconds = seconds
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """End the connection; a thread that waits for a message gets an error. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int, ends_at: float | None) -> bytes:
        parts: list[bytes] = []
        while count:
            if ends_at is not None:  # for all reads together: a peer may send one byte at a time
                if (left := ends_at - time.monotonic()) <= 0:
                    raise TimeoutError("the peer takes too long for a message")
                self._connection.settimeout(left)
            part = self._connection.recv(count)
            if not part:
                raise ConnectionError("the connection was closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def decoder_of(messages: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of a union of messages."""
    return msgspec.msgpack.Decoder(messages)
