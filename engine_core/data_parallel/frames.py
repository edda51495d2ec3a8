"""Sends and receives messages over a stream socket: four bytes of length, then msgpack."""

import contextlib
import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

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
