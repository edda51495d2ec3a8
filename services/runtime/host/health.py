"""grpc.health.v1: one state for the whole process, published under "" and under every service's name."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from .limits import PROBES
from .listener import SERVER_OPTIONS, bind
from .servicer_edge import Edge

_Status = health_pb2.HealthCheckResponse

LIVENESS = "liveness"
"""A name that is SERVING as long as the process answers: one that waits for others, or drains, must not be killed."""
READINESS = "readiness"
"""A name that is SERVING while the service takes work. A gateway takes requests while no engine serves: they wait."""
MEDIA = "media"
"""A name that is SERVING while a gateway answers requests with images or sounds. It is not known where no model reads
any."""


class Health:
    """NOT_SERVING until the service is ready, then SERVING, and NOT_SERVING again while it drains, is not healthy or
    would not answer because other parts are missing.

    Attributes:
        serving: The state now.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change``: called when ``serving`` has changed."""
        self._on_change = on_change
        self._servicer = health_aio.HealthServicer()
        self._names = [""]
        self._probes: grpc.aio.Server | None = None
        self._is_ready = False
        self._is_healthy = True
        self._is_answering = True
        self._answers_media: bool | None = None  # None: no model does
        self.serving = False

    async def start(self, edge: Edge) -> None:
        """Add the servicer to ``edge``; it answers NOT_SERVING."""
        edge.add_servicer(health_pb2_grpc.add_HealthServicer_to_server, self._servicer)
        await self._servicer.set(LIVENESS, _Status.SERVING)
        await self.set_serving(False)

    async def serve_probes(self, listen: str) -> str:
        """Open a port that answers health checks only, in plain text (kubelet's probes carry no certificate); return
        its address. Raises ``Unavailable`` when it cannot be bound."""
        self._probes = grpc.aio.server(
            options=[*SERVER_OPTIONS, *PROBES.options()], maximum_concurrent_rpcs=PROBES.calls
        )
        # Not behind the edge, whose checks of certificates a kubelet cannot pass; the port has nothing else to offer.
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._probes)
        address = bind(self._probes, listen, None, insecure=True, field="health_listen")
        await self._probes.start()
        return address

    async def set_serving(self, serving: bool, names: Iterable[str] = ()) -> None:
        """Set the state, under these further names too, and send it to the callers of ``Watch``."""
        self._is_ready = serving
        self._names += names
        await self._publish()

    async def set_healthy(self, healthy: bool) -> None:
        """Set whether the service can do its work; while it cannot, the state is NOT_SERVING."""
        self._is_healthy = healthy
        await self._publish()

    async def set_answering(self, answering: bool) -> None:
        """Set whether the parts that the service needs are present. This changes every state except readiness."""
        if answering != self._is_answering:
            self._is_answering = answering
            await self._publish()

    async def set_media(self, answered: bool) -> None:
        """Set whether requests with images or sounds are answered too, under :data:`MEDIA`. Nothing else follows from
        it: requests of text need no encoder."""
        if answered != self._answers_media:
            self._answers_media = answered
            await self._publish()

    async def _publish(self) -> None:
        is_ready = self._is_ready and self._is_healthy
        before, self.serving = self.serving, is_ready and self._is_answering
        if self.serving != before:
            self._on_change()
        # Readiness ignores the other parts: requests wait at a gateway while no engine serves. A Service of Kubernetes
        # without a ready pod would refuse them instead.
        await self._servicer.set(READINESS, _status(is_ready))
        if self._answers_media is not None:
            await self._servicer.set(MEDIA, _status(self.serving and self._answers_media))
        await asyncio.gather(*(self._servicer.set(name, _status(self.serving)) for name in self._names))

    async def close(self) -> None:
        """Close the port of probes."""
        if self._probes is not None:
            await self._probes.stop(None)


def _status(serving: bool) -> Any:
    return _Status.SERVING if serving else _Status.NOT_SERVING
