"""Reads what the kernel counts of a TCP connection: its name, the bytes that it has taken, and those that were read."""

import fcntl
import socket
import struct
import termios
from typing import Protocol

_TCP_PROTOCOL = struct.pack("@i", socket.IPPROTO_TCP)
_SO_COOKIE, _ACKED_AT, _RECEIVED_AT, _INFO_BYTES = 57, 120, 128, 136
"""The last three: of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in the kernel's ``tcp_info``, and their end."""
_ESTABLISHED = 1


class SocketOptions(Protocol):
    """Describes a socket, as a transport shows its own."""

    def fileno(self) -> int: ...

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


Descriptor = int | SocketOptions


def cookie_of(descriptor: Descriptor) -> int:
    """Return the kernel's name of a socket. Raises ``OSError``."""
    cookie: int = struct.unpack("@Q", _option(descriptor, socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
    return cookie


def num_taken(descriptor: Descriptor) -> int:
    """Return how many bytes the kernel has taken from a TCP connection: those that its client has acknowledged, and
    those that are still queued. Raises ``OSError``."""
    while True:
        acknowledged = _num_acknowledged(descriptor)
        queued: int = struct.unpack("@i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))[0]
        if acknowledged == _num_acknowledged(descriptor):
            return acknowledged + queued


def num_read(descriptor: int) -> int:
    """Return how many bytes of a TCP connection were read from the kernel. Raises ``OSError``."""
    while True:
        received = _num_received(descriptor)
        unread: int = struct.unpack("@i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
        if received == _num_received(descriptor):
            return received - unread


def _num_received(descriptor: int) -> int:
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    count: int = struct.unpack_from("@Q", info, _RECEIVED_AT)[0]
    return count


def is_established(descriptor: int) -> bool:
    """Return whether a socket is a TCP connection that neither end has closed. Raises ``OSError``."""
    if _option(descriptor, socket.SOL_SOCKET, socket.SO_PROTOCOL, 4) != _TCP_PROTOCOL:
        return False
    return _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)[0] == _ESTABLISHED


def local_port(descriptor: int) -> int:
    """Return the port of a socket. Raises ``OSError``."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        name = connection.getsockname()
    finally:
        connection.detach()
    return int(name[1]) if isinstance(name, tuple) else 0


def _num_acknowledged(descriptor: Descriptor) -> int:
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    count: int = struct.unpack_from("@Q", info, _ACKED_AT)[0]
    return count


def _option(descriptor: Descriptor, level: int, name: int, size: int) -> bytes:
    if not isinstance(descriptor, int):
        return descriptor.getsockopt(level, name, size)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        return connection.getsockopt(level, name, size)
    finally:
        connection.detach()
