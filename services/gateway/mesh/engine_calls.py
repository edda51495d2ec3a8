"""Asks engines what operators want of them, over ``EngineAdmin``."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import coordinator_pb2, engine_pb2_grpc

from .mesh_view import MeshView

T = TypeVar("T")
Ask = Callable[["engine_pb2_grpc.EngineAdminAsyncStub"], Awaitable[T]]


def alive(view: MeshView) -> list[coordinator_pb2.EngineIdentity]:
    """Return the engines of a mesh that are not known to be dead, by name."""
    known = (entry.identity for entry in view.engines if entry.report.state != coordinator_pb2.ENGINE_STATE_DEAD)
    return sorted(known, key=lambda engine: engine.engine_id)


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """Asks several engines at the same time."""

    channels: Channels
    """With a certificate that engines accept as an operator's."""
    timeout: float
    """Seconds that the slowest engine may take."""

    async def ask(self, engines: Mapping[str, str], send: "Ask[T]") -> dict[str, T | errors.TokenloomError]:
        """Return each engine's answer or error, by its name. All engines are asked, whatever one of them answers.

        ``engines``: addresses by name. An error begins with the engine's name. Raises ``Unavailable`` without engines.
        """
        if not engines:
            raise errors.Unavailable("no engine is known; retry")
        answers = await asyncio.gather(*(self._ask_one(name, engines[name], send) for name in engines))
        return dict(zip(engines, answers, strict=True))

    async def _ask_one(self, name: str, address: str, send: "Ask[T]") -> T | errors.TokenloomError:
        try:
            async with asyncio.timeout(self.timeout), self.channels.open(address, "engine") as channel:
                return await send(engine_pb2_grpc.EngineAdminStub(channel))
        except TimeoutError:
            return errors.DeadlineExceeded(f"{name}: the engine took longer than {self.timeout:g} s")
        except grpc.aio.AioRpcError as failure:
            error = wire_errors.from_rpc(failure)
        error.message = f"{name}: {error.message}"
        return error


def checked(answers: Mapping[str, T | errors.TokenloomError]) -> dict[str, T]:
    """Return the answers of all engines. Raises the first error."""
    done: dict[str, T] = {}
    for name, answer in answers.items():
        if isinstance(answer, errors.TokenloomError):
            raise answer
        done[name] = answer
    return done
