"""Holds what a process uses of the world around it: sockets, random numbers and clocks. A simulation gives its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random, SystemRandom

import grpc.aio

from ..peers.channels import Channels
from ..peers.tls import MeshTLS
from .limits import GrpcLimits
from .listener import SERVER_OPTIONS, ServiceListener, bind
from .service_settings import ServiceSettings
from .servicer_edge import Edge


class Port:
    """Serves an edge over gRPC at an address of its own, for peers within the mesh."""

    def __init__(
        self, edge: Edge, listen: str, limits: GrpcLimits, tls: MeshTLS | None, *, insecure: bool, field: str
    ) -> None:
        """Bind ``listen``, which the option ``field`` names. Raises as :func:`bind`."""
        self._server = grpc.aio.server(
            options=[*SERVER_OPTIONS, *limits.options()], maximum_concurrent_rpcs=limits.calls
        )
        self._server.add_generic_rpc_handlers((edge,))
        credentials = tls.server_credentials() if tls is not None else None
        self.address = bind(self._server, listen, credentials, insecure=insecure, field=field)

    async def start(self) -> None:
        """Start to answer calls."""
        await self._server.start()

    async def close(self, grace: float) -> None:
        """End calls after ``grace`` seconds. Idempotent."""
        await self._server.stop(grace)


class Network:
    """Makes the sockets of one process: those on which it listens, and those that connect it to its peers."""

    def listener(self, settings: ServiceSettings, edge: Edge) -> ServiceListener:
        """Return what serves ``edge`` at the address of the service."""
        return ServiceListener(settings, edge)

    def port(
        self, edge: Edge, listen: str, limits: GrpcLimits, tls: MeshTLS | None, *, insecure: bool, field: str
    ) -> Port:
        """Return a further port, which is bound but does not answer yet. Raises as :class:`Port`."""
        return Port(edge, listen, limits, tls, insecure=insecure, field=field)

    def channels(self, tls: MeshTLS | None = None) -> Channels:
        """Return what opens channels to peers. ``tls``: this process's certificate; None: the mesh has none."""
        return Channels(tls)


@dataclass(frozen=True, slots=True)
class Clock:
    """Reads the time since no particular moment, for durations that are measured. What a part decides by the time, it
    decides by the time of the running event loop."""

    seconds: Callable[[], float] = time.monotonic
    nanoseconds: Callable[[], int] = time.monotonic_ns
    wall_milliseconds: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    """Since 1970; it may jump. Numbers that must grow from one process to the next follow it."""


@dataclass(frozen=True, slots=True)
class HostDependencies:
    """Holds what one process uses of the world around it.

    Attributes:
        random: Draws epochs, ids, seeds and leases.
    """

    network: Network = field(default_factory=Network)
    random: Random = field(default_factory=SystemRandom)
    clock: Clock = Clock()
