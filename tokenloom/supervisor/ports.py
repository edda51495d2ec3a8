"""Holds the ports of the gateways from before the first part starts until the last one has ended."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .held_listener import PortTaken, hold_grpc, hold_http, is_listening, reserve

__all__ = ["GRPC_OFFSET", "GatewayPorts", "PortTaken", "held_ports", "reserved_ports"]

_Open = Callable[[str, int], socket.socket]

GRPC_OFFSET = 1000
"""Distance from the HTTP port to the gRPC port, unless the user sets --grpc-port."""


@dataclass(frozen=True)
class GatewayPorts:
    """The ports of one gateway, and the descriptors of the sockets that listen on them for it."""

    http: int
    grpc: int
    http_descriptor: int | None = field(default=None, compare=False)
    """None: the gateway opens the port itself."""
    grpc_descriptor: int | None = field(default=None, compare=False)
    """None where gRPC cannot share a port: the gateway opens it, and connections are refused while it restarts."""


@contextlib.contextmanager
def reserved_ports(host: str, gateways: int, http: int, grpc: int | None) -> Iterator[list[GatewayPorts]]:
    """Reserve consecutive ports from the given ones, or free ports for 0, until the context ends.

    The ports are free for the servers that they are meant for, and only for these.
    Raises ``PortTaken`` for a given port that another server listens on.
    """
    with _opened(reserve, reserve, host, gateways, http, grpc) as pairs:
        yield [GatewayPorts(_port(h), _port(g)) for h, g in pairs]


@contextlib.contextmanager
def held_ports(host: str, gateways: int, http: int, grpc: int | None) -> Iterator[list[GatewayPorts]]:
    """Do the same with sockets that listen, which every gateway that runs within the context inherits.

    While none runs, connections wait in the backlog: they are neither refused nor accepted by another process.
    """
    with _opened(hold_http, hold_grpc, host, gateways, http, grpc) as pairs:
        yield [GatewayPorts(_port(h), _port(g), _descriptor(h), _descriptor(g)) for h, g in pairs]


@contextlib.contextmanager
def _opened(
    open_http: _Open, open_grpc: _Open, host: str, gateways: int, http: int, grpc: int | None
) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    if grpc is None:
        grpc = http + GRPC_OFFSET if http else 0
    with contextlib.ExitStack() as stack:
        # All of them stay open: two ports must not be the same free one.
        https = [stack.enter_context(open_http(host, http and http + i)) for i in range(gateways)]
        grpcs = [stack.enter_context(open_grpc(host, grpc and grpc + i)) for i in range(gateways)]
        yield list(zip(https, grpcs, strict=True))


def _port(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def _descriptor(held: socket.socket) -> int | None:
    return held.fileno() if is_listening(held) else None
