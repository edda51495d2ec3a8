"""A coordinator that sends whatever it likes ends no engine, which joins again and serves on."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import mutated
from tests.services.engine.control.test_coordinator_link import is_serving, running_coordinator, see
from tests.services.engine.peer import Peer, make_add, make_settings, running_engine
from tokenloom.request.errors import Unavailable
from tokenloom.services.engine.control import coordinator_link
from tokenloom.v1.coordinator_pb2 import EngineCommand
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH

NUM_LIES = 20


@pytest.mark.parametrize("seed", range(6))
async def test_a_coordinator(socket_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its orders to leave, to stop and to load count like an honest one's: nobody can distinguish them."""
    rng, read = random.Random(seed), coordinator_link._read
    told = list[EngineCommand]()

    async def lying(call: Any) -> EngineCommand:
        """Each stream ends after its first command, which is a lie."""
        if len(told) >= 2 * NUM_LIES:
            return await read(call)
        told.append(lie := EngineCommand())
        if not len(told) % 2:
            raise Unavailable("the coordinator ended the stream")
        command = await read(call)
        lie.CopyFrom(mutated(command, rng, rng.randint(1, 4)))
        for order in ("drain", "adapters"):
            lie.ClearField(order)
        lie.desired.pause_mode = command.desired.pause_mode
        return lie

    monkeypatch.setattr(coordinator_link, "_read", lying)
    monkeypatch.setattr(coordinator_link, "MIN_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(coordinator_link, "MAX_BACKOFF_SECONDS", 0.01)
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, _), running_engine(settings) as host:
        async with asyncio.timeout(60):
            while len(told) < 2 * NUM_LIES:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await see(stub, is_serving)
        async with Peer(host.address) as peer:
            await peer.send(make_add(1, [5, 6, 7], 5))
            received = await peer.read_until_finished([1])
    assert received.finished[1].reason == FINISH_REASON_LENGTH
