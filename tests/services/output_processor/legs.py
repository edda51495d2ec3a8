"""Engines of both kinds, and requests brought to a stage of their two legs."""

import asyncio
from dataclasses import dataclass

import pytest

from tests.services.output_processor.fakes import LENGTH, EngineStream, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.v1.engine_pb2 import AddRequest, Finished
from tokenloom.v1.types_pb2 import EngineRole, FinishReason

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR
BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


@pytest.fixture
def roles() -> list[EngineRole]:
    return [PREFILL, PREFILL, DECODE, DECODE]


@dataclass
class Part:
    """An attempt as its engine sees it."""

    stream: EngineStream
    add: AddRequest

    @property
    def slot(self) -> int:
        return self.add.slot

    def finish(self, num_tokens: int, reason: FinishReason = LENGTH, **fields: object) -> None:
        self.stream.send(finished=[Finished(slot=self.slot, reason=reason, num_output_tokens=num_tokens, **fields)])

    async def aborted(self) -> None:
        """Nothing but its abort comes."""
        message = await self.stream.next_input()
        assert list(message.abort_slots) == [self.slot]
        assert not message.add


async def part(mesh: Mesh, engine: int) -> Part:
    """The next attempt, which must be the first on a new stream of this engine."""
    stream = await mesh.engines[engine].next_stream()
    (add,) = await stream.next_adds(1)
    return Part(stream, add)


async def part_at_any(mesh: Mesh, *engines: int) -> Part:
    """The next attempt at one of these engines, which must be the first on a new stream."""
    waiting = [asyncio.create_task(part(mesh, engine)) for engine in engines]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for each in waiting:
            each.cancel()


async def prefilling(mesh: Mesh, **fields: object) -> tuple[Gateway, Part]:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, **fields)])  # type: ignore[arg-type]
    return gateway, await part(mesh, 0)


async def decoding(mesh: Mesh, ids: list[int], **fields: object) -> tuple[Gateway, Part, Part]:
    """A request whose first token was handed over and seen by the gateway."""
    gateway, prefill = await prefilling(mesh, **fields)
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    assert list((await gateway.next_frame()).token_ids) == ids[:1]
    return gateway, prefill, await part(mesh, 2)


def picks(mesh: Mesh) -> list[EngineRole]:
    return [request.role for request in mesh.coordinator.requests]


async def nothing_live(gateway: Gateway, stream: EngineStream) -> None:
    """The next request's Add is the next thing that an engine hears."""
    await gateway.send(submit=[submit(9)])
    message = await stream.next_input()
    assert len(message.add) == 1
    assert not message.abort_slots
