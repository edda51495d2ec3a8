"""Reserves the ports of the gateways before any part starts, so that a gateway finds its port free at each start."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tokenloom.services.runtime.peers.addresses import Address

GRPC_OFFSET = 1000
"""Distance from the HTTP port to the gRPC port, unless the user sets --grpc-port."""


class PortTaken(Exception):
    """A gateway cannot listen on a port that the user gave."""


@dataclass(frozen=True)
class GatewayPorts:
    """The ports of one gateway."""

    http: int
    grpc: int


@contextlib.contextmanager
def reserved_ports(host: str, gateways: int, http: int, grpc: int | None) -> Iterator[list[GatewayPorts]]:
    """Reserve consecutive ports from the given ones, or free ports for 0, until the context ends.

    A reserved port is bound but does not listen. Servers that set ``SO_REUSEADDR`` (the gateway's do) can bind it;
    the kernel gives it to no outgoing connection and to no other server that asks for a free port.
    Raises ``PortTaken`` for a given port that another server listens on.
    """
    if grpc is None:
        grpc = http + GRPC_OFFSET if http else 0
    with contextlib.ExitStack() as stack:
        https, grpcs = ([_reserve(stack, host, first, i) for i in range(gateways)] for first in (http, grpc))
        yield [GatewayPorts(*pair) for pair in zip(https, grpcs, strict=True)]


def _reserve(stack: contextlib.ExitStack, host: str, first: int, index: int) -> int:
    port = first + index if first else 0
    held = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports end at 65535"
        raise PortTaken(f"cannot bind {Address(host=host, port=port)}: {reason}; choose another port") from None
    return int(held.getsockname()[1])
