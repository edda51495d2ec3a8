"""What an operator asks of all engines at once, forwarded to each."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from tokenloom.request import errors
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import coordinator_pb2, engine_pb2_grpc

from .mesh_view import MeshView

T = TypeVar("T")
Ask = Callable[["engine_pb2_grpc.EngineAdminAsyncStub"], Awaitable[T]]


class EngineAdmins:
    """The ``EngineAdmin`` services of the engines that the coordinator knows."""

    def __init__(self, mesh: MeshView, channels: Channels) -> None:
        """``channels``: of a part that engines admit as an operator."""
        self._mesh = mesh
        self._channels = channels

    async def ask(self, send: "Ask[T]") -> dict[str, T]:
        """Each engine's answer, by its name. All are asked, whatever one of them says.

        Raises ``Unavailable`` without any engine, else the first failure, with the engine's name before it.
        """
        alive = (
            entry.identity for entry in self._mesh.engines if entry.report.state != coordinator_pb2.ENGINE_STATE_DEAD
        )
        engines = sorted(alive, key=lambda engine: engine.engine_id)
        if not engines:
            raise errors.Unavailable("no engine is known; try again")
        asked = [self._ask(engine, send) for engine in engines]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told: dict[str, T] = {}
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, BaseException):
                raise _named(engine.engine_id, answer)
            told[engine.engine_id] = answer
        return told

    async def _ask(self, engine: coordinator_pb2.EngineIdentity, send: "Ask[T]") -> T:
        async with self._channels.open(engine.address, "engine") as channel:
            try:
                return await send(engine_pb2_grpc.EngineAdminStub(channel))
            except grpc.aio.AioRpcError as failure:
                raise errors.from_rpc(failure) from failure


def _named(engine_id: str, failure: BaseException) -> errors.TokenloomError:
    error = errors.of_exception(failure)
    error.message = f"{engine_id}: {error.message}"
    return error
