"""The engine's front sends requests with rows to a core that reads slowly, and some of them are cancelled half sent."""

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from tests.engine_core.helpers import make_config, make_request
from tests.explorer.world import World
from tokenloom.engine_core.client import async_core_client
from tokenloom.engine_core.client.async_core_client import AsyncMPClient, AsyncSocket
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from tokenloom.engine_core.wire.array_arena import MIN_BYTES, ArenaReader
from tokenloom.engine_core.wire.frames import Decoder, encode, to_raw

NUM_REQUESTS = 6
_SHAPE = (16, MIN_BYTES // 64)
_ARENA_BYTES = 3 * MIN_BYTES
_PROMPT = 2000
"""Tokens of a prompt: more bytes than the socket takes at once."""
_CONFIG = make_config()
CONFIG = msgspec.structs.replace(
    _CONFIG, parallel=msgspec.structs.replace(_CONFIG.parallel, array_arena_bytes=_ARENA_BYTES)
)


class _Core:
    """Reads what the front sends, slowly, as the core's process does."""

    def __init__(self, world: World, connection: socket.socket, arena: ArenaReader) -> None:
        self.received: list[int] = []
        self._world = world
        self._socket = AsyncSocket(connection)
        self._requests = Decoder(EngineCoreRequest, arena)
        self._calls = Decoder(UtilityCall)

    async def run(self) -> None:
        """Read, until cancelled."""
        while True:
            await self._world.step(8)
            kind, *frames = await self._socket.receive()
            if kind == RequestType.ADD.value:
                self._take(self._requests.decode(frames))
            elif kind == RequestType.UTILITY.value:
                call = self._calls.decode(frames)
                output = UtilityOutput(call.call_id, to_raw("pong"))
                await self._socket.send(encode(EngineCoreOutputs(utility_output=output)))
            else:
                self._world.violated(f"the core received {bytes(kind)[:20]!r} as the kind of a message")

    def close(self) -> None:
        """Read no more."""
        self._socket.fail(EngineDeadError("the core has ended"))

    def _take(self, request: EngineCoreRequest) -> None:
        number = int(request.request_id)
        rows = request.prompt_embeds[0].rows
        is_whole = len(request.prompt_token_ids) == _PROMPT and bool((rows == number).all())
        self._world.check(is_whole, "a request arrived with the rows of another one")
        self.received.append(number)


class CoreClientScenario:
    """Requests are sent at the same time, through a socket with little room, and some of their senders go."""

    uses_disk = False

    async def run(self, world: World) -> None:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        far.setblocking(False)
        process: Any = SimpleNamespace(connection=near, stop=lambda _: None)
        with patch.object(async_core_client, "CoreProcess", lambda _: process):
            client = AsyncMPClient(CONFIG, ())
        address = client._arena.address
        assert address is not None
        core = _Core(world, far, ArenaReader(msgspec.structs.replace(address, fd=os.dup(address.fd))))
        reading = [world.begin(core.run(), "core"), world.begin(client.get_output(), "outputs")]
        sent: list[int] = []
        senders = [
            world.actor(_send(world, client, number, sent), f"sender {number}") for number in range(NUM_REQUESTS)
        ]
        await asyncio.wait(senders)
        try:
            async with asyncio.timeout(60):
                world.check(await client.call_utility("ping") == "pong", "the core answers another call")
        except TimeoutError:
            world.violated("the core answers no more")
        world.check(set(sent) <= set(core.received), "a request that was sent did not arrive")
        world.check(len(set(core.received)) == len(core.received), "a request arrived twice")
        world.check(not client._arena.num_lent, "rows stay lent after the core has dropped them")
        for task in reading:
            task.cancel()
        await world.all_ended()
        await client.close()
        core.close()
        far.close()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _send(world: World, client: AsyncMPClient, number: int, sent: list[int]) -> None:
    await world.step(6)
    request = make_request(str(number), range(_PROMPT))
    rows = np.full(_SHAPE, number, np.float32)
    await client.add_request(msgspec.structs.replace(request, prompt_embeds=[EmbedsSpan(0, rows)]))
    sent.append(number)
