"""grpc.health.v1 of a process: one truth for the whole of it, told under "" and under every service's name."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

_Status = health_pb2.HealthCheckResponse

LIVENESS = "liveness"
"""A name that is SERVING for as long as the process answers: who waits for others, or drains, is not to be killed."""


class Health:
    """NOT_SERVING until ready, SERVING, and NOT_SERVING again while draining; ``Watch`` tells each change."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()
        self._names = [""]
        self._serving = False

    @property
    def serving(self) -> bool:
        return self._serving

    async def start(self, server: grpc.aio.Server) -> None:
        """Adds the servicer, answering NOT_SERVING."""
        self.serve_on(server)
        await self._servicer.set(LIVENESS, _Status.SERVING)
        await self.set_serving(False)

    def serve_on(self, server: grpc.aio.Server) -> None:
        """Answers there too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def add_names(self, names: list[str]) -> None:
        """Names that ``Check`` and ``Watch`` know from the next :meth:`set_serving` on."""
        self._names += names

    async def set_serving(self, serving: bool) -> None:
        """Tells all who watch."""
        self._serving = serving
        status = _Status.SERVING if serving else _Status.NOT_SERVING
        await asyncio.gather(*(self._servicer.set(name, status) for name in self._names))
