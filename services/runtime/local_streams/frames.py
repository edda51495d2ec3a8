"""The frames that a local stream's socket carries. No I/O.

A frame is its payload's length (four bytes, little-endian), its kind (one byte) and its payload. A change of this
format also changes :data:`addresses.STREAMS_SUFFIX`, so that processes of different versions use gRPC.
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

HEADER = struct.Struct("<IB")
"""A payload's length in bytes, and the kind."""


class Kind(enum.IntEnum):
    """Says what a frame carries."""

    OPEN = 1
    """The first frame to the server: the method's full name, in UTF-8."""
    MESSAGE = 2
    """A serialized message, in either direction."""
    HALF_CLOSE = 3
    """To the server: no message follows. The payload is empty."""
    STATUS = 4
    """The last frame to the client: see :func:`encode_status`."""
    BEAT = 5
    """Sent in either direction after a tick without another frame: the sender is alive. The payload is empty."""


_KINDS = {kind.value: kind for kind in Kind}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_STATUS = msgspec.msgpack.Decoder(tuple[int, str, tuple[tuple[str, bytes], ...]])


def encode_frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return HEADER.pack(len(payload), kind) + payload


def encode_status(code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> bytes:
    """Return the payload of a STATUS frame. ``trailing``: metadata of the call's end."""
    pairs = [(key, value if isinstance(value, bytes) else value.encode()) for key, value in trailing]
    return msgspec.msgpack.encode((code.value[0], details, pairs))


def decode_status(payload: bytes) -> grpc.aio.AioRpcError:
    """Read the payload of a STATUS frame; the result holds code OK for a call that succeeded. Metadata are bytes under
    keys that end with ``-bin`` and text under others, as in gRPC.

    Raises ``Internal`` for a payload that is no status.
    """
    try:
        code, details, trailing = _STATUS.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Internal("the status of a local stream cannot be decoded") from None
    pairs = ((key, value if key.endswith("-bin") else value.decode(errors="replace")) for key, value in trailing)
    return status(_CODES.get(code, grpc.StatusCode.UNKNOWN), details, grpc.aio.Metadata(*pairs))


def status(code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    """Return how a call ended."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details=details)


OK_STATUS = encode_status(grpc.StatusCode.OK)
"""The payload at the end of nearly every call, which is neither encoded nor decoded again."""


def split_frames(
    rest: bytearray, data: bytes, max_payload_bytes: int
) -> tuple[list[tuple[Kind, bytes]], TokenloomError | None]:
    """Return the frames that ``data`` completes, however the stream of bytes is split, and why what follows them is no
    frame; split no more then. ``ResourceExhausted`` for a payload over the limit, as soon as its length is known,
    ``Internal`` for an unknown kind.

    ``rest``: what the last call left, empty at first; takes the beginning of a frame, bounded by the longest one.
    """
    # Most reads hold whole frames only. They are parsed in place, and a frame that was cut is copied into ``rest``.
    view: bytes | bytearray = data
    if rest:
        rest += data
        view = rest
    frames: list[tuple[Kind, bytes]] = []
    start, end = 0, len(view)
    error: TokenloomError | None = None
    while end - start >= HEADER.size:
        size, number = HEADER.unpack_from(view, start)
        # The length is checked before the payload has arrived: otherwise a peer could make this side hold 4 GB.
        if (kind := _KINDS.get(number)) is None:
            error = Internal(f"unknown frame kind {number}")
            break
        if size > max_payload_bytes:
            text = f"a message of {size} bytes exceeds the limit of {max_payload_bytes} bytes"
            error = ResourceExhausted(text, retry_after=None)
            break
        if (stop := start + HEADER.size + size) > end:
            break
        frames.append((kind, bytes(memoryview(view)[start + HEADER.size : stop])))
        start = stop
    if view is rest:
        del rest[:start]
    elif start < end:
        rest += data[start:]
    return frames, error
