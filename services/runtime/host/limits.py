"""Limits of a process and of its servers: file descriptors, connections, calls, and fields of messages. As many
descriptors as the system allows, with some kept for the mesh's own links and files."""

import logging
import resource
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.request.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:  # the help of a command needs settings only
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

HANDSHAKE_SECONDS = 10.0
"""How long a connection may take until it speaks HTTP/2."""


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Bounds one server. The defaults are for the parts of a mesh, which keep few connections and many calls.

    Attributes:
        connections: Open connections of a port; gRPC closes further ones when it accepts them. It knows no limit by
            address.
        streams: Open calls of a connection; clients keep further ones back.
        calls: Open calls of all connections; further ones end in RESOURCE_EXHAUSTED.
        is_patient: Whether clients may be silent for longer (see :func:`.patient_options`).
    """

    connections: int = 1024
    streams: int = 4096
    calls: int = 16384
    is_patient: bool = False

    def options(self) -> list[tuple[str, int]]:
        """Return the options of the server. It also needs ``maximum_concurrent_rpcs=calls``."""
        from ..peers.keepalive import patient_options  # here, because the help of a command needs settings only

        return [
            ("grpc.max_allowed_incoming_connections", for_peers(self.connections)),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
            *(patient_options() if self.is_patient else ()),
        ]


PROBES = GrpcLimits(connections=64, streams=64, calls=256)
"""For the port that answers health checks only."""


log = logging.getLogger(__name__)

RESERVED_SHARE = 1 / 8
MIN_RESERVED = 128
"""Descriptors that clients never get: for links to other parts, listeners, the metrics port, files, and connections
that are closed as soon as they have been accepted."""
MIN_OWN = 64
"""Descriptors that links from other parts never get. An idle part has some 40 open, its core a few more."""
NEEDED = MIN_RESERVED + 64
"""The lowest limit with which a part starts: a gateway has two edges, with 32 clients each at least."""


def raise_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one. Returns the limit that applies."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems refuse their own hard limit
        OF_PROCESS.begin("low_open_files", f"it stays {soft}: {error}")
        return soft
    log.info("raised the limit of open descriptors from %d to %d", soft, hard)
    return hard


def check_limit(limit: int, needed: int = NEEDED) -> None:
    """Raise ``FailedPrecondition`` if so many open descriptors do not suffice. ``limit``: as ``getrlimit`` says it."""
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise FailedPrecondition(
            f"the limit of open files is {limit}, and {needed} are needed: raise it with `ulimit -n {needed}` or "
            "more, or LimitNOFILE of the service"
        )


def for_peers(wanted: int) -> int:
    """Return how many connections of other parts a server may hold: ``wanted``, or fewer if the descriptors of this
    process do not suffice for all of them and its own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not the bound of clients, which leaves 128: with 128 open files it left the servers of the other parts one
    # connection, and the gateway never got ready and wrote nothing.
    return wanted if limit == resource.RLIM_INFINITY else max(1, min(wanted, limit - MIN_OWN))


def for_clients(wanted: int, num_edges: int = 1) -> int:
    """Return how many connections of clients each of ``num_edges`` listeners may hold: ``wanted``, or fewer if the
    descriptors of this process do not suffice for all of them and for what is reserved."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    # Connections of clients cost descriptors, and a gateway that has none left can neither reach its peers nor refuse.
    available = limit - max(MIN_RESERVED, int(limit * RESERVED_SHARE))
    return max(1, min(wanted, available // num_edges))


LARGE_BYTES = 128 << 10
"""Smaller messages are decoded without being counted."""
MAX_FIELDS = 1 << 15
"""Limits the fields of a large message, nested ones included; a packed list of token ids is one field."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

M = TypeVar("M", bound="Message")


def decoded(kind: type[M], data: bytes) -> M:
    """Return a client's message. An empty element takes two bytes on the wire, and a hundred in memory, so that a large
    one is counted before. Raises ``InvalidArgument`` and ``DecodeError``."""
    if len(data) > LARGE_BYTES:
        check_fields(data, cast("Descriptor", kind.DESCRIPTOR))
    return kind.FromString(data)


def check_fields(data: bytes, descriptor: "Descriptor") -> None:
    """Raise ``InvalidArgument`` for a message with too many fields, or with groups, which have no length.

    Returns early for a message that cannot be decoded.
    """
    count = 0
    # A list and not recursion: the depth of nesting is the sender's choice.
    ranges = [(_nested(descriptor), 0, len(data))]  # bounded by the count
    try:
        while ranges:
            nested, at, end = ranges.pop()
            while at < end:
                count += 1
                if count > MAX_FIELDS:
                    raise InvalidArgument(f"the message has more than {MAX_FIELDS} fields; split the request")
                key, at = _varint(data, at)
                if key & 7 != _BYTES:
                    at = _after_number(data, at, key & 7)
                    continue
                size, at = _varint(data, at)
                if (child := nested.get(key >> 3)) is not None:
                    ranges.append((_nested(child), at, min(at + size, end)))
                at += size
    except IndexError:
        return


def _after_number(data: bytes, at: int, kind: int) -> int:
    """Return where a field that is no text and no message ends."""
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind in (_FIXED64, _FIXED32):
        return at + (8 if kind == _FIXED64 else 4)
    raise InvalidArgument("the message has a group, which no method takes")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most ten bytes, and where it ends."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80 and shift < 70:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at + 1


@cache  # once for each message type
def _nested(descriptor: "Descriptor") -> "dict[int, Descriptor]":
    """Return the types of the fields that are messages, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
