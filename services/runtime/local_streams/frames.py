"""What crosses the socket of a local stream: one call, in frames of a kind and a payload. No I/O.

A frame is its payload's length (four bytes, little-endian), its kind (one byte) and its payload. Whoever changes this
changes :data:`sockets.SUFFIX` too, so that parts of different versions talk gRPC.
"""

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import grpc
import grpc.aio
import msgspec

from tokenloom.request.errors import Internal, ResourceExhausted

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

_HEADER = struct.Struct("<IB")


class Kind(enum.IntEnum):
    """What a frame is."""

    OPEN = 1
    """To the server, the first: the method's full name, in UTF-8."""
    MESSAGE = 2
    """Either way: a serialized message."""
    HALF_CLOSE = 3
    """To the server: no message follows. Empty."""
    STATUS = 4
    """To the client, the last: a :class:`Status`."""
    BEAT = 5
    """Either way, from who has sent nothing for a tick: it lives. Empty."""


_KINDS = {kind.value: kind for kind in Kind}


class Status(msgspec.Struct, frozen=True, array_like=True):
    """How a call ended, as a gRPC status.

    Attributes:
        code: A number of ``grpc.StatusCode``.
        details: For people.
        trailing: Metadata that came with it, as bytes.
    """

    code: int
    details: str = ""
    trailing: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(cls, code: grpc.StatusCode, details: str = "", metadata: Metadata = ()) -> "Status":
        """From what an ``abort`` is given."""
        trailing = ((key, value if isinstance(value, bytes) else value.encode()) for key, value in metadata)
        return cls(code.value[0], details, tuple(trailing))

    @property
    def status_code(self) -> grpc.StatusCode:
        return _CODES.get(self.code, grpc.StatusCode.UNKNOWN)

    @property
    def metadata(self) -> grpc.aio.Metadata:
        """As gRPC has it: bytes under keys that end with ``-bin``, text under others."""
        pairs = (
            (key, value if key.endswith("-bin") else value.decode(errors="replace")) for key, value in self.trailing
        )
        return grpc.aio.Metadata(*pairs)


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Status)


def encode_status(status: Status) -> bytes:
    """The payload of a STATUS frame."""
    return _encoder.encode(status)


def decode_status(payload: bytes) -> Status:
    """Inverse of :func:`encode_status`. Raises ``Internal`` for a payload that is none."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Internal("a status cannot be read") from None


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """A frame."""
    return _HEADER.pack(len(payload), kind) + payload


class FrameDecoder:
    """Finds frames in a stream of bytes, however it is split."""

    def __init__(self, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._rest = bytearray()  # the beginning of a frame: bounded by the longest one

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """The frames that ``data`` completes; to be iterated to the end before more is fed.

        Raises ``ResourceExhausted`` for a payload over the limit, as soon as its length is known, ``Internal`` for
        bytes that are no frame; then nothing can be found any more.
        """
        view: bytes | bytearray = data
        if self._rest:
            self._rest += data
            view = self._rest
        start, end = 0, len(view)
        while end - start >= _HEADER.size:
            size, number = _HEADER.unpack_from(view, start)
            if (kind := _KINDS.get(number)) is None:
                raise Internal(f"a frame of kind {number}, which there is not")
            if size > self._max_payload_bytes:
                raise ResourceExhausted(
                    f"a message of {size} bytes is over the limit of {self._max_payload_bytes}", retry_after=None
                )
            if (stop := start + _HEADER.size + size) > end:
                break
            yield kind, bytes(memoryview(view)[start + _HEADER.size : stop])
            start = stop
        if view is self._rest:
            del self._rest[:start]
        elif start < end:
            self._rest += data[start:]
