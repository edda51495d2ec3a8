"""Asks the engines of a local mesh how many tokens a request may have."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio

from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import engine_pb2, engine_pb2_grpc

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
