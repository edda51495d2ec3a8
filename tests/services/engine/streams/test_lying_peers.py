"""An output processor that sends whatever it likes loses its own stream at most."""

import asyncio
import random
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.mutations import mutated
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings, running_engine, seconds
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.v1.engine_pb2 import AcceptTokens, EngineInput, StopAt
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH

PROMPT = [5, 6, 7]


def _message(slot: int) -> EngineInput:
    return EngineInput(
        add=[
            make_add(slot, PROMPT, 20, timeout=seconds(5)),
            make_add(slot + 1, PROMPT, 20, awaits_tokens=True, accepted_token_ids=[9]),
        ],
        accept=[AcceptTokens(slot=slot + 1, token_ids=[8])],
        stop_at=[StopAt(slot=slot, num_tokens=3)],
        abort_slots=[slot + 1],
        credit=3,
    )


@pytest.mark.parametrize("seed", range(8))
async def test_an_output_processor(socket_dir: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with running_engine(make_settings(socket_dir)) as host:
        for _ in range(8):
            async with Peer(host.address) as liar, asyncio.timeout(30):
                await liar.read()
                try:
                    for slot in (1, 3, 5):
                        await liar.call.write(mutated(_message(slot), rng, rng.randint(1, 4)))
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    continue  # its stream has ended
        async with Peer(host.address) as honest:
            await honest.send(make_add(1, PROMPT, 5))
            received = await honest.read_until_finished([1])
    assert received.token_ids[1] == expected_tokens(PROMPT, 5, VOCAB_SIZE)
    assert received.finished[1].reason == FINISH_REASON_LENGTH
