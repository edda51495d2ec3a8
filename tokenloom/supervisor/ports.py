"""Holds the ports of the gateways from before the first part starts until the last one has ended.

While a gateway restarts, connections wait in the backlog of a socket that the supervisor keeps. A gateway inherits the
socket of its HTTP port. gRPC cannot use a given socket, but it can share a port (``SO_REUSEPORT``), and the kernel asks
a program which of the port's sockets gets a new connection. Ours names the second socket, the gateway's; while only
the first, this one, listens, the kernel falls back to it.
"""

import contextlib
import ctypes
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tokenloom.services.runtime.addresses import Address

__all__ = ["GRPC_OFFSET", "GatewayPorts", "PortTaken", "held_ports", "reserved_ports"]

_Open = Callable[[str, int], socket.socket]

GRPC_OFFSET = 1000
"""Distance from the HTTP port to the gRPC port, unless the user sets --grpc-port."""


@dataclass(frozen=True)
class GatewayPorts:
    """The ports of one gateway, or relay, and the descriptors of the sockets that listen on them for it."""

    http: int
    """0: a relay that clients of gRPC alone connect to."""
    grpc: int
    http_descriptor: int | None = field(default=None, compare=False)
    """None: the gateway opens the port itself."""
    grpc_descriptor: int | None = field(default=None, compare=False)
    """None where gRPC cannot share a port: the gateway opens it, and connections are refused while it restarts."""


@contextlib.contextmanager
def reserved_ports(host: str, gateways: int, http: int | None, grpc: int | None) -> Iterator[list[GatewayPorts]]:
    """Reserve consecutive ports from the given ones, or free ports for 0, until the context ends. The same for relays.

    The ports are free for the servers that they are meant for, and only for these. ``http``: None: they have none.
    Raises ``PortTaken`` for a given port that another server listens on.
    """
    with _opened(reserve, reserve, host, gateways, http, grpc) as ports:
        yield ports


@contextlib.contextmanager
def held_ports(host: str, gateways: int, http: int | None, grpc: int | None) -> Iterator[list[GatewayPorts]]:
    """Do the same with sockets that listen, which every gateway that runs within the context inherits.

    While none runs, connections wait in the backlog: they are neither refused nor accepted by another process.
    """
    with _opened(hold_http, hold_grpc, host, gateways, http, grpc) as ports:
        yield ports


@contextlib.contextmanager
def _opened(
    open_http: _Open, open_grpc: _Open, host: str, gateways: int, http: int | None, grpc: int | None
) -> Iterator[list[GatewayPorts]]:
    if grpc is None:
        grpc = http + GRPC_OFFSET if http else 0
    with contextlib.ExitStack() as stack:
        # All of them stay open: two ports must not be the same free one.
        https = [
            None if http is None else stack.enter_context(open_http(host, http and http + i)) for i in range(gateways)
        ]
        grpcs = [stack.enter_context(open_grpc(host, grpc and grpc + i)) for i in range(gateways)]
        yield [
            GatewayPorts(_port(h), _port(g), _descriptor(h), _descriptor(g)) for h, g in zip(https, grpcs, strict=True)
        ]


def _port(held: socket.socket | None) -> int:
    return 0 if held is None else int(held.getsockname()[1])


def _descriptor(held: socket.socket | None) -> int | None:
    return held.fileno() if held is not None and is_listening(held) else None


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
