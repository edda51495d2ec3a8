"""Peers that send whatever they like: every request ends, with output that it may have or a typed error, and the
process goes on."""

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.mutations import mutated
from tests.services.output_processor.fakes import LENGTH, SOON, VOCAB_SIZE, EngineStream, FakeEngine, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.v1.engine_pb2 import AddRequest, EngineFrame, Finished, SlotLogprobs
from tokenloom.v1.output_processor_pb2 import ProcessInput
from tokenloom.v1.types_pb2 import FinishReason, Logprobs

MAX_TOKENS = 6
TOKENS = list(range(40, 40 + MAX_TOKENS))

Lie = Callable[[EngineFrame], EngineFrame]


def _truth(add: AddRequest) -> list[EngineFrame]:
    """The frames of an attempt whose engine is right: each token, then the end."""
    slot, frames = add.slot, list[EngineFrame]()
    for index in range(len(add.accepted_token_ids), MAX_TOKENS):
        columns = Logprobs(sampled=[-1.0], rank=[1], top=1, token_id=[5], logprob=[-0.5])
        frames.append(
            EngineFrame(
                step=index + 1,
                slot=[slot],
                token_index=[index],
                num_tokens=[1],
                token_ids=TOKENS[index : index + 1],
                logprobs=[SlotLogprobs(slot=slot, token_index=index, logprobs=columns)],
            )
        )
    end = Finished(slot=slot, reason=LENGTH, num_output_tokens=MAX_TOKENS)
    return [*frames, EngineFrame(step=MAX_TOKENS + 1, finished=[end])]


async def _answer(engine: FakeEngine, lie: Lie) -> None:
    """Answer all attempts on all streams of an engine, until cancelled."""

    async def serve(stream: EngineStream) -> None:
        while True:
            for add in (await stream.inputs.get()).add:
                for frame in _truth(add):
                    stream.frames.put_nowait(lie(frame))

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(serve(await engine.streams.get()))


async def _end(gateway: Gateway, slot: int) -> tuple[list[int], FinishReason, str]:
    _, ids, finished = await gateway.until_finished(slot)
    return ids, finished.reason, finished.error.reason


@pytest.mark.parametrize("seed", range(12))
async def test_an_engine(mesh: Mesh, seed: int) -> None:
    rng = random.Random(seed)

    def lie(frame: EngineFrame) -> EngineFrame:
        return mutated(frame, rng, rng.randint(1, 3)) if rng.random() < 0.3 else frame

    tasks = [
        asyncio.create_task(_answer(mesh.engines[0], lie)),
        asyncio.create_task(_answer(mesh.engines[1], lambda f: f)),
    ]
    try:
        gateway = await mesh.gateway(credit=100_000)
        for slot in range(1, 9):
            await gateway.send(submit=[submit(slot, max_tokens=MAX_TOKENS, logprobs=1)])
            ids, reason, error = await asyncio.wait_for(_end(gateway, slot), SOON)
            assert len(ids) <= MAX_TOKENS
            assert max(ids, default=0) < VOCAB_SIZE
            assert reason in FinishReason.values()
            assert bool(error) == (reason == FinishReason.FINISH_REASON_ERROR)
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.parametrize("seed", range(12))
async def test_a_gateway(mesh: Mesh, seed: int) -> None:
    """It loses its own stream at most; another one's requests are answered."""
    rng = random.Random(seed)
    tasks = [asyncio.create_task(_answer(engine, lambda frame: frame)) for engine in mesh.engines]
    try:
        for number in range(6):
            liar = await mesh.gateway(peer_id=f"liar-{number}")
            message = ProcessInput(submit=[submit(1, max_tokens=MAX_TOKENS, logprobs=1)], credit=4)
            await liar.call.write(mutated(message, rng, rng.randint(1, 4)))
        gateway = await mesh.gateway(credit=1000)
        await gateway.send(submit=[submit(1, max_tokens=MAX_TOKENS, logprobs=1)])
        assert await asyncio.wait_for(_end(gateway, 1), SOON) == (TOKENS, LENGTH, "")
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
