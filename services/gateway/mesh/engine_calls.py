"""Asks engines what operators want of them: over ``EngineAdmin``, or by the state that the coordinator keeps."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc
import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, encoder_pb2_grpc, engine_pb2_grpc

from .mesh_view import MeshView

if TYPE_CHECKING:
    from tokenloom.v1.encoder_pb2_grpc import EncoderAsyncStub

_AGAIN_SECONDS = 0.2
"""Between two calls of a coordinator that does not answer."""
_ANSWER_SECONDS = 5.0
"""How much longer than it was asked to wait the coordinator may take to answer."""
_SLOW = "it is on its way"

T = TypeVar("T")
_Coordinator: TypeAlias = "coordinator_pb2_grpc.CoordinatorAsyncStub"
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
        calls = (self._ask_one(name, engines[name], "engine", _at_engine(send)) for name in engines)
        return dict(zip(engines, await asyncio.gather(*calls), strict=True))

    async def ask_encoders(
        self, encoders: Mapping[str, str], send: "Callable[[EncoderAsyncStub], Awaitable[T]]"
    ) -> dict[str, T | errors.TokenloomError]:
        """Return each encoder's answer or error, as :meth:`ask` does; nothing without encoders."""

        def at(channel: grpc.aio.Channel) -> Awaitable[T]:
            return send(encoder_pb2_grpc.EncoderStub(channel))

        calls = (self._ask_one(name, encoders[name], "encoder", at) for name in encoders)
        return dict(zip(encoders, await asyncio.gather(*calls), strict=True))

    async def check(self, engines: Mapping[str, str], send: "Ask[object]") -> None:
        """Ask engines whether they could do something, before all are made to. Raises the first refusal. An engine that
        cannot be reached, or is of an older release, refuses nothing: the state that is wanted awaits it."""
        for answer in (await self.ask(engines, send) if engines else {}).values():
            if isinstance(answer, (errors.InvalidArgument, errors.FailedPrecondition)):
                raise answer

    async def want(
        self, mesh: MeshView, request: coordinator_pb2.SetDesiredStateRequest, send: "Ask[object]"
    ) -> dict[str, str]:
        """Have the coordinator of a mesh want another state of its engines. Returns for each engine why it is not in
        it; empty: it is.

        ``send``: the same, of one engine of an older release, or of all if the coordinator is of one. Raises what the
        coordinator answers: a state that does not follow from the one before, or ``Unavailable`` if it is lost for
        long.
        """
        answer = await self._want(mesh, request)
        addresses = {each.engine_id: each.address for each in alive(mesh)}
        if answer is None:
            return dict.fromkeys(checked(await self.ask(addresses, send)), "")
        causes = {each.engine_id: "" if each.is_done else each.cause or _SLOW for each in answer.engines}
        older = [each.engine_id for each in answer.engines if not each.follows and each.engine_id in addresses]
        if older:
            for name, found in (await self.ask({name: addresses[name] for name in older}, send)).items():
                causes[name] = found.message if isinstance(found, errors.TokenloomError) else ""
        return causes

    async def _want(
        self, mesh: MeshView, request: coordinator_pb2.SetDesiredStateRequest
    ) -> coordinator_pb2.SetDesiredStateResponse | None:
        """Return the coordinator's answer; None: it is of an older release."""

        def send(stub: "_Coordinator", left: float) -> "Awaitable[coordinator_pb2.SetDesiredStateResponse]":
            request.patience.FromMilliseconds(round(left * 1000))
            return stub.SetDesiredState(request, timeout=left + _ANSWER_SECONDS)

        try:
            return await self.ask_coordinator(mesh, send)
        except errors.Unimplemented:
            return None

    async def ask_coordinator(self, mesh: MeshView, send: "Callable[[_Coordinator, float], Awaitable[T]]") -> T:
        """Return the answer of the coordinator of a mesh to a call that may be repeated.

        ``send``: gets the seconds that are left. Raises what the coordinator answers, and ``Unavailable`` if it is lost
        for long.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.timeout
        async with self.channels.open(mesh.address, "coordinator") as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            while True:
                try:
                    return await send(stub, max(ends_at - loop.time(), 0.0))
                except grpc.aio.AioRpcError as failure:
                    # A coordinator that is restarted, or whose standby takes over, is asked again: the state may have
                    # been set or not, and setting it twice does no harm.
                    is_away = wire_errors.code_of(failure) is grpc.StatusCode.UNAVAILABLE
                    if not is_away or loop.time() + _AGAIN_SECONDS > ends_at:
                        raise wire_errors.from_rpc(failure) from None
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _ask_one(
        self, name: str, address: str, service: str, send: Callable[[grpc.aio.Channel], Awaitable[T]]
    ) -> T | errors.TokenloomError:
        try:
            async with asyncio.timeout(self.timeout), self.channels.open(address, service) as channel:
                return await send(channel)
        except TimeoutError:
            return errors.DeadlineExceeded(f"{name}: the {service} took longer than {self.timeout:g} s")
        except grpc.aio.AioRpcError as failure:
            error = wire_errors.from_rpc(failure)
        error.message = f"{name}: {error.message}"
        return error


def _at_engine(send: "Ask[T]") -> Callable[[grpc.aio.Channel], Awaitable[T]]:
    return lambda channel: send(engine_pb2_grpc.EngineAdminStub(channel))


def checked(answers: Mapping[str, T | errors.TokenloomError]) -> dict[str, T]:
    """Return the answers of all engines. Raises the first error."""
    done: dict[str, T] = {}
    for name, answer in answers.items():
        if isinstance(answer, errors.TokenloomError):
            raise answer
        done[name] = answer
    return done
