"""Engines that load LoRA adapters for operators, without a model."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from tests.services.gateway.fakes import LIMITS, FakeMesh
from tokenloom.request import errors, wire_errors
from tokenloom.v1 import engine_pb2 as pb
from tokenloom.v1 import engine_pb2_grpc, types_pb2

KEYS = {"admin_api_key": "admin"}
ADMIN = {"authorization": "Bearer admin"}


class FakeEngine(engine_pb2_grpc.EngineAdminServicer):
    """The digest of an adapter is that of its path, which ``files`` may replace. It changes nothing before it may."""

    def __init__(self) -> None:
        self.loaded: dict[str, types_pb2.Adapter] = {}
        self.files: dict[str, bytes] = {}
        self.error: errors.TokenloomError | None = None
        self.num_resets = 0
        self.moved = pb.MoveRequestsResponse()
        self.moves: list[pb.MoveRequestsRequest] = []
        self.may_change = asyncio.Event()
        self.may_change.set()

    async def ResetEncoderCache(
        self, request: pb.ResetEncoderCacheRequest, context: Any
    ) -> pb.ResetEncoderCacheResponse:
        self.num_resets += 1
        return pb.ResetEncoderCacheResponse()

    async def MoveRequests(self, request: pb.MoveRequestsRequest, context: Any) -> pb.MoveRequestsResponse:
        self.moves.append(request)
        if self.error is not None:
            await wire_errors.abort(context, self.error)
        return self.moved

    async def LoadLora(self, request: pb.LoadLoraRequest, context: Any) -> pb.LoadLoraResponse:
        await self._fail(context)
        known = self.loaded.get(request.name)
        if known is not None and not request.in_place:
            await wire_errors.abort(context, errors.FailedPrecondition("another adapter has this name"))
        digest = self.files.get(request.path) or hashlib.sha256(request.path.encode()).digest()
        self.loaded[request.name] = types_pb2.Adapter(name=request.name, digest=digest)
        return pb.LoadLoraResponse(adapter=self.loaded[request.name])

    async def UnloadLora(self, request: pb.UnloadLoraRequest, context: Any) -> pb.UnloadLoraResponse:
        if isinstance(self.error, errors.Unavailable):
            await wire_errors.abort(context, self.error)
        if self.loaded.pop(request.name, None) is None:
            await wire_errors.abort(context, errors.NotFound("not loaded"))
        return pb.UnloadLoraResponse()

    async def PinLora(self, request: pb.PinLoraRequest, context: Any) -> pb.PinLoraResponse:
        if request.pinned:
            await self._fail(context)
        self.loaded[request.name].pinned = request.pinned
        return pb.PinLoraResponse()

    async def ListLoras(self, request: Any, context: Any) -> pb.ListLorasResponse:
        states = [pb.LoraState(adapter=each, rank=8, in_slot=True, requests=2) for each in self.loaded.values()]
        return pb.ListLorasResponse(adapters=states)

    async def _fail(self, context: Any) -> None:
        await self.may_change.wait()
        if self.error is not None:
            await wire_errors.abort(context, self.error)


@asynccontextmanager
async def with_engines(mesh: FakeMesh, *names: str) -> AsyncIterator[dict[str, FakeEngine]]:
    """Serve engines of these names to the mesh's coordinator; the gateway must start after them."""
    engines = {name: FakeEngine() for name in names}
    servers = []
    for name, engine in engines.items():
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineAdminServicer_to_server(engine, server)
        mesh.coordinator.addresses[name] = mesh.address(name)
        server.add_insecure_port(mesh.address(name))
        await server.start()
        servers.append(server)
    mesh.coordinator.engines = names
    mesh.coordinator.limits = types_pb2.ModelLimits()
    mesh.coordinator.limits.CopyFrom(LIMITS)
    mesh.coordinator.limits.max_lora_rank = 16
    try:
        yield engines
    finally:
        for server in servers:
            await server.stop(0)
