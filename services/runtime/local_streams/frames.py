"""The frames that a local stream's socket carries. No I/O.

A frame is its payload's length (four bytes, little-endian), its kind (one byte) and its payload. A change of this
format also changes :data:`sockets.SUFFIX`, so that processes of different versions use gRPC.
"""

import enum
import struct
from collections.abc import Sequence
from typing import TypeAlias

import grpc
import grpc.aio
import msgspec

from tokenloom.request.errors import Internal, ResourceExhausted, TokenloomError

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

_HEADER = struct.Struct("<IB")


class Kind(enum.IntEnum):
    """Says what a frame carries."""

    OPEN = 1
    """The first frame to the server: the method's full name, in UTF-8."""
    MESSAGE = 2
    """A serialized message, in either direction."""
    HALF_CLOSE = 3
    """To the server: no message follows. The payload is empty."""
    STATUS = 4
    """The last frame to the client: a :class:`Status`."""
    BEAT = 5
    """Sent in either direction after a tick without another frame: the sender is alive. The payload is empty."""


_KINDS = {kind.value: kind for kind in Kind}


class Status(msgspec.Struct, frozen=True, array_like=True):
    """How a call ended, as a gRPC status.

    Attributes:
        code: A number of ``grpc.StatusCode``.
        details: The message for people.
        trailing: The trailing metadata, as bytes.
    """

    code: int
    details: str = ""
    trailing: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def of(cls, code: grpc.StatusCode, details: str = "", metadata: Metadata = ()) -> "Status":
        """Make a status from the arguments of ``ServicerContext.abort``."""
        trailing = ((key, value if isinstance(value, bytes) else value.encode()) for key, value in metadata)
        return cls(code.value[0], details, tuple(trailing))

    @property
    def status_code(self) -> grpc.StatusCode:
        return _CODES.get(self.code, grpc.StatusCode.UNKNOWN)

    @property
    def metadata(self) -> grpc.aio.Metadata:
        """The trailing metadata as gRPC shows it: bytes under keys that end with ``-bin``, text under others."""
        pairs = (
            (key, value if key.endswith("-bin") else value.decode(errors="replace")) for key, value in self.trailing
        )
        return grpc.aio.Metadata(*pairs)


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Status)


def encode_status(status: Status) -> bytes:
    """Return the payload of a STATUS frame."""
    return _encoder.encode(status)


def decode_status(payload: bytes) -> Status:
    """Read the payload of a STATUS frame. Raises ``Internal`` for a payload that is no status."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Internal("the status of a local stream cannot be decoded") from None


def encode(kind: Kind, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return _HEADER.pack(len(payload), kind) + payload


class FrameDecoder:
    """Finds frames in a stream of bytes, however it is split.

    Attributes:
        error: Why the bytes after the frames found so far are no frame; feed no more then. ``ResourceExhausted`` for a
            payload over the limit, as soon as its length is known, ``Internal`` for an unknown kind.
    """

    def __init__(self, max_payload_bytes: int) -> None:
        self.error: TokenloomError | None = None
        self._max_payload_bytes = max_payload_bytes
        self._rest = bytearray()  # the beginning of a frame, bounded by the longest one

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """Return the frames that ``data`` completes."""
        view: bytes | bytearray = data
        if self._rest:
            self._rest += data
            view = self._rest
        frames: list[tuple[Kind, bytes]] = []
        start, end = 0, len(view)
        while end - start >= _HEADER.size:
            size, number = _HEADER.unpack_from(view, start)
            if (kind := _KINDS.get(number)) is None or size > self._max_payload_bytes:
                self.error = self._refuse(size, number)
                break
            if (stop := start + _HEADER.size + size) > end:
                break
            frames.append((kind, bytes(memoryview(view)[start + _HEADER.size : stop])))
            start = stop
        if view is self._rest:
            del self._rest[:start]
        elif start < end:
            self._rest += data[start:]
        return frames

    def _refuse(self, size: int, number: int) -> TokenloomError:
        if number not in _KINDS:
            return Internal(f"unknown frame kind {number}")
        limit = self._max_payload_bytes
        return ResourceExhausted(f"a message of {size} bytes exceeds the limit of {limit} bytes", retry_after=None)
