"""What an engine must not send is not believed: the request goes on elsewhere, and after two such frames all do."""

import asyncio
import logging
from collections.abc import Callable
from math import inf, nan

import pytest

from tests.loop_clock import settle
from tests.services.output_processor.fakes import LENGTH, SOON, VOCAB_SIZE, EngineStream, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import part_at_any
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import EngineFrame, Finished, SlotLogprobs
from tokenloom.v1.types_pb2 import EngineRole, Logprobs

MAX_TOKENS = 8


def _columns(slot: int, number: float = -1.0, token_id: int = 5) -> list[SlotLogprobs]:
    columns = Logprobs(sampled=[number], rank=[1], top=1, token_id=[token_id], logprob=[number])
    return [SlotLogprobs(slot=slot, token_index=0, logprobs=columns)]


LIES: dict[str, Callable[[EngineStream, int], object]] = {
    "token": lambda stream, slot: stream.send((slot, 0, [VOCAB_SIZE])),
    "huge token": lambda stream, slot: stream.send((slot, 0, [5, 2**32 - 1])),
    "budget": lambda stream, slot: stream.send((slot, 0, [5] * 100_000)),
    "torn": lambda stream, slot: stream.frames.put_nowait(EngineFrame(step=9, slot=[slot], token_ids=[5, 6])),
    "count": lambda stream, slot: stream.frames.put_nowait(
        EngineFrame(step=9, slot=[slot], token_index=[0], num_tokens=[2**32 - 1], token_ids=[5])
    ),
    "nan": lambda stream, slot: stream.send((slot, 0, [5]), logprobs=_columns(slot, nan)),
    "infinity": lambda stream, slot: stream.send((slot, 0, [5]), logprobs=_columns(slot, inf)),
    "alternative": lambda stream, slot: stream.send((slot, 0, [5]), logprobs=_columns(slot, token_id=VOCAB_SIZE)),
    "reason": lambda stream, slot: stream.send(
        finished=[Finished(slot=slot, reason=99, num_output_tokens=0)]  # type: ignore[arg-type]
    ),
    "end": lambda stream, slot: stream.send(finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=3)]),
}


async def _complete(gateway: Gateway, stream: EngineStream, slot: int, gateway_slot: int) -> None:
    stream.send((slot, 0, [7]), finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=1)])
    _, ids, finished = await gateway.until_finished(gateway_slot)
    assert (ids, finished.reason) == ([7], LENGTH)


@pytest.mark.parametrize("lie", LIES)
async def test_the_request_goes_on_elsewhere(mesh: Mesh, lie: str) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, max_tokens=MAX_TOKENS, logprobs=1))
    LIES[lie](stream, slot)
    other = await part_at_any(mesh, 1)
    assert not other.add.accepted_token_ids
    await _complete(gateway, other.stream, other.slot, 1)


async def test_a_request_that_brings_out_a_bug_disturbs_no_other(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (first, second) = await mesh.started(gateway, submit(1, max_tokens=MAX_TOKENS), submit(2))
    LIES["budget"](stream, first)
    await part_at_any(mesh, 1)
    await _complete(gateway, stream, second, 2)


async def test_after_two_wrong_frames_an_engine_is_left(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    LIES["torn"](stream, slot)
    first = await part_at_any(mesh, 1)
    await gateway.send(submit=[submit(2)])
    second = await part_at_any(mesh, 0)
    LIES["torn"](second.stream, second.slot)
    (again,) = await first.stream.next_adds(1)
    await gateway.send(submit=[submit(3)])  # the coordinator picks engine-0
    (third,) = await first.stream.next_adds(1)
    assert len(mesh.engines[0].streams._queue) == 0  # type: ignore[attr-defined]
    assert "wrong_peer" in caplog.text
    for attempt, number in ((first.add, 1), (again, 2), (third, 3)):
        await _complete(gateway, first.stream, attempt.slot, number)


@pytest.mark.parametrize("becomes", ["restarted", "gone"])
async def test_an_engine_that_is_no_more_is_no_sign_of_a_fault(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, becomes: str
) -> None:
    caplog.set_level(logging.INFO)
    gateway, coordinator = await mesh.gateway(), mesh.coordinator
    stream, (slot,) = await mesh.started(gateway, submit(1))
    LIES["torn"](stream, slot)
    first = await part_at_any(mesh, 1)
    await gateway.send(submit=[submit(2)])
    second = await part_at_any(mesh, 0)
    LIES["torn"](second.stream, second.slot)
    await first.stream.next_adds(1)
    assert "wrong_peer of engine-0" in caplog.text
    left = coordinator.engines.pop(0)
    coordinator.roles.pop(0)
    if becomes == "restarted":
        restarted = EngineIdentity()
        restarted.CopyFrom(left)
        restarted.epoch += 1
        coordinator.engines.append(restarted)
        coordinator.roles.append(EngineRole.ENGINE_ROLE_BOTH)
    coordinator.publish()
    async with asyncio.timeout(SOON):
        while "wrong_peer of engine-0 has ended" not in caplog.text:
            await settle()


class TestTheOnlyEngine:
    @pytest.fixture
    def roles(self) -> list[EngineRole]:
        return [EngineRole.ENGINE_ROLE_BOTH]

    async def test_a_request_that_it_brings_no_further_ends_typed(self, mesh: Mesh) -> None:
        gateway = await mesh.gateway()
        stream, (slot,) = await mesh.started(gateway, submit(1))
        LIES["torn"](stream, slot)
        for _ in range(2):
            again = await part_at_any(mesh, 0)
            LIES["torn"](again.stream, again.slot)
        error = (await gateway.until_finished(1))[2].error
        assert error.reason == "INTERNAL"
        assert "again and again" in error.message
