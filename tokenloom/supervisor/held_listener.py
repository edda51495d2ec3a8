"""Opens listening sockets that keep a gateway's ports while it restarts: connections wait in their backlog.

A gateway inherits the socket of its HTTP port. gRPC cannot use a given socket, but it can share a port
(``SO_REUSEPORT``), and the kernel asks a program which of the port's sockets gets a new connection. Ours names the
second socket, the gateway's; while only the first, this one, listens, the kernel falls back to it.
"""

import ctypes
import socket
import struct
import sys

from tokenloom.services.runtime.addresses import Address

BACKLOG = 4096
"""Connections that may wait for a gateway; the kernel lowers it to ``net.core.somaxconn``."""
_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RETURN_CONSTANT = 0x06
_SECOND_SOCKET = 1


class PortTaken(Exception):
    """A gateway cannot listen on a port that the user gave."""


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that does not listen; 0: a free port. Raises `PortTaken`.

    Servers that set ``SO_REUSEADDR`` can bind its port. The kernel gives it to no outgoing connection, and to no other
    server that asks for a free port.
    """
    # Bound, never listening. A free port that was only chosen was bound seconds later by the gateway, and any outgoing
    # connection in between could take it: the mesh did not come up.
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    _bind(reserved, host, host, port)
    return reserved


def hold_http(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the port; 0: a free one. Raises `PortTaken`."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    _bind(held, host, host, port)
    held.listen(BACKLOG)
    return held


def hold_grpc(host: str, port: int) -> socket.socket:
    """Return a socket that keeps the port; 0: a free one. Raises `PortTaken`.

    It listens where the system lets a gateway share the port, and otherwise only reserves it.
    """
    if sys.platform != "linux":
        return reserve(host, port)
    held, bound = _grpc_socket(host)
    _bind(held, host, bound, port)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # now: `bind` has refused the port of another server
    held.listen(BACKLOG)
    # A relay in front of gRPC would keep the port open as well, but every token would pay for it. Here the kernel
    # decides once for each connection, and nothing is added to one that is made while the gateway runs.
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN_CONSTANT, 0, 0, _SECOND_SOCKET), 8)
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    held.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    return held


def is_listening(held: socket.socket) -> bool:
    """Return whether the socket accepts connections, so that a gateway can adopt it."""
    return bool(held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _bind(held: socket.socket, host: str, bound: str, port: int) -> None:
    """Bind a socket to `bound`, which is `host` for the user. Closes it before it raises `PortTaken`."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((bound, port))
    except (OSError, OverflowError, UnicodeError, TypeError) as error:  # the last two: no name of a host
        held.close()
        reason = "ports end at 65535" if isinstance(error, OverflowError) else getattr(error, "strerror", None)
        reason = reason or "this is no name of a host"
        raise PortTaken(f"cannot bind {Address(host=host, port=port)}: {reason}; choose another port") from None


def _grpc_socket(host: str) -> tuple[socket.socket, str]:
    """Return a socket of the family that gRPC uses for a host, with the host's address in that family.

    Only sockets of one family share a port, and gRPC prefers IPv6 sockets for IPv4 addresses too.
    """
    if not _has_ipv6():
        return socket.socket(socket.AF_INET), host
    held = socket.socket(socket.AF_INET6)
    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if ":" in host:
        return held, host
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError, TypeError):
        return held, host  # `bind` reports it
    return held, "::" if address == "0.0.0.0" else f"::ffff:{address}"


def _has_ipv6() -> bool:
    """Return what gRPC finds when it looks for IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
