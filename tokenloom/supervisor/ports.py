"""Chooses the ports of the gateways before any part starts, so that a restarted gateway keeps its port."""

import contextlib
import socket
from dataclasses import dataclass

GRPC_OFFSET = 1000
"""Distance from the HTTP port to the gRPC port, unless the user sets --grpc-port."""


@dataclass(frozen=True)
class GatewayPorts:
    """The ports of one gateway."""

    http: int
    grpc: int


def choose_ports(host: str, gateways: int, http: int, grpc: int | None) -> list[GatewayPorts]:
    """Return consecutive ports from the given ones; 0 stands for free ports."""
    if grpc is None:
        grpc = http + GRPC_OFFSET if http else 0
    https, grpcs = ([first + i for i in range(gateways)] if first else [] for first in (http, grpc))
    free = _free_ports(host, gateways * (2 - bool(http) - bool(grpc)))
    https = https or [free.pop() for _ in range(gateways)]
    grpcs = grpcs or [free.pop() for _ in range(gateways)]
    return [GatewayPorts(*pair) for pair in zip(https, grpcs, strict=True)]


def _free_ports(host: str, count: int) -> list[int]:
    """Return unused ports; all are held until the last one is found, so that they differ."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]
