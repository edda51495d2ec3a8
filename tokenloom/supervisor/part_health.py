"""Asks the running parts of a local mesh: whether they serve, and how many tokens a request may have."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import engine_pb2, engine_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_RETRY_SECONDS = 0.1


async def follow(address: str, report: Callable[[bool], None]) -> None:
    """Report whether the part is SERVING, now and at each change, until cancelled. An unreachable part is not."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for response in call:
                    report(response.status == _SERVING)
            except grpc.aio.AioRpcError:
                pass
            finally:
                call.cancel()
            report(False)
            await asyncio.sleep(_RETRY_SECONDS)


async def is_serving(address: str, timeout: float = 1.0) -> bool:
    """Return whether the part is SERVING; a part that does not answer within `timeout` seconds is not."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == _SERVING)


_TIMEOUT = 2.0


async def context_length(addresses: Sequence[str]) -> int | None:
    """Return the smallest context length of the engines at these addresses, in tokens; None: none of them answers."""
    lengths = await asyncio.gather(*map(_context_length, addresses))
    return min((length for length in lengths if length), default=None)


async def _context_length(address: str) -> int:
    async with open_channel(address) as channel:
        stub = engine_pb2_grpc.EngineAdminStub(channel)
        try:
            info = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError:
            return 0
        return int(info.max_model_len)
