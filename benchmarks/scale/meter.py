"""Follows the registry from the process that measures: counts the bytes, and waits until engines are shown."""

import asyncio
from collections.abc import Callable

import grpc.aio

from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import EngineState, Snapshot, WatchRequest

from .patient_channels import PatientChannels

_WATCH = "/tokenloom.v1.Coordinator/Watch"
_RETRY_SECONDS = 0.05


class Meter:
    """Watches as an output processor does.

    Attributes:
        num_bytes: Bytes of the messages that have arrived.
        num_dead: Engines that were shown as dead, counted in each view.
        view: What is shown now.
    """

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._changed = asyncio.Event()
        self.num_bytes = 0
        self.num_dead = 0
        self.view = RegistryView()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with PatientChannels().open(self._coordinator, "coordinator") as channel:
            watch: grpc.aio.UnaryStreamMultiCallable[WatchRequest, bytes] = channel.unary_stream(
                _WATCH, request_serializer=WatchRequest.SerializeToString
            )
            while True:
                self.view = RegistryView()
                call = watch(WatchRequest(changes=True))
                try:
                    while isinstance(data := await call.read(), bytes):
                        self._take(data)
                except grpc.aio.AioRpcError:
                    self.view = RegistryView()
                finally:
                    call.cancel()
                await asyncio.sleep(_RETRY_SECONDS)

    def _take(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.view.take(Snapshot.FromString(data))
        dead = EngineState.ENGINE_STATE_DEAD
        self.num_dead += sum(entry.report.state == dead for entry in self.view.engines)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[RegistryView], bool]) -> None:
        """Wait until the view is as it should be."""
        while not holds(self.view):
            await self._changed.wait()
