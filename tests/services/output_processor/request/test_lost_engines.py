"""Tests what a gateway sees when engines die, fall silent or hang."""

import asyncio
from collections.abc import Callable

import pytest

from tests.services.output_processor.fakes import SOON, STOP, EngineStream, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.services.output_processor.placement import engine_link
from tokenloom.v1.engine_pb2 import EngineFrame, Finished
from tokenloom.v1.types_pb2 import FinishReason

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR


def _kill(mesh: Mesh, stream: EngineStream) -> None:
    stream.frames.put_nowait(None)


def _break_columns(mesh: Mesh, stream: EngineStream) -> None:
    stream.frames.put_nowait(EngineFrame(step=1, slot=[1, 2], token_index=[0], token_ids=[5, 6]))


@pytest.mark.parametrize("how", [_kill, _break_columns])
async def test_when_an_engine_is_lost_its_requests_end_retryably(
    mesh: Mesh, how: Callable[[Mesh, EngineStream], None]
) -> None:
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1), submit(2))
    how(mesh, stream)
    frame = await gateway.next_frame()
    assert {end.slot for end in frame.finished} == {1, 2}
    assert set(frame.engine_death_slots) == {1, 2}
    for end in frame.finished:
        assert (end.reason, end.error.reason) == (ERROR, "UNAVAILABLE")
        assert end.error.HasField("retry_after")
    await gateway.send(submit=[submit(3)])
    assert len(await (await mesh.engines[0].next_stream()).next_adds(1)) == 1, "a new stream serves the next"


async def test_a_silent_engine_is_dead(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_TICK_SECONDS", 0.02)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    assert (await gateway.until_finished(1))[2].error.reason == "UNAVAILABLE"
    await asyncio.wait_for(stream.ended.wait(), SOON)


@pytest.mark.parametrize("hang_timeout", [0.3])
async def test_an_engine_whose_step_stands_still_is_hung(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_TICK_SECONDS", 0.02)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    beats = asyncio.create_task(_beat(stream))
    try:
        assert (await gateway.until_finished(1))[2].error.reason == "UNAVAILABLE"
    finally:
        beats.cancel()


@pytest.mark.parametrize("hang_timeout", [0.1])
async def test_the_step_of_a_paused_engine_may_stand_still(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_TICK_SECONDS", 0.02)
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    for _ in range(30):
        stream.frames.put_nowait(EngineFrame(step=stream.step, paused=True))
        await asyncio.sleep(0.01)
    stream.send((slot, 0, [65]), finished=[Finished(slot=slot, reason=STOP, num_output_tokens=1)])
    assert (await gateway.until_finished(1))[2].reason == STOP


async def _beat(stream: EngineStream) -> None:
    while True:
        stream.send()
        stream.step -= 1
        await asyncio.sleep(0.02)


async def test_an_engine_that_does_not_answer_is_excluded_from_the_next_pick(mesh: Mesh) -> None:
    await mesh.servers[0].kill()
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1)])
    (add,) = await (await mesh.engines[1].next_stream()).next_adds(1)
    assert add.request_id == "request-1"
    assert [each.engine_id for each in mesh.coordinator.requests[1].exclude] == ["engine-0"]


async def test_without_the_coordinator_the_last_snapshot_places(mesh: Mesh) -> None:
    mesh.coordinator.error = Unavailable("away")
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1), submit(2)])
    for engine in mesh.engines:
        (add,) = await (await engine.next_stream()).next_adds(1)
        assert not add.HasField("pick")


async def test_the_gateway_learns_that_the_mesh_is_full(mesh: Mesh) -> None:
    mesh.coordinator.error = ResourceExhausted("every engine is full", retry_after=2)
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1)])
    error = (await gateway.until_finished(1))[2].error
    assert (error.reason, error.message, error.retry_after.seconds) == ("RESOURCE_EXHAUSTED", "every engine is full", 2)
