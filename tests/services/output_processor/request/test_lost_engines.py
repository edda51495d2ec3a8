"""Tests what a gateway sees when engines die, fall silent or hang."""

import asyncio
from collections.abc import Callable

import pytest

from tests.loop_clock import pass_time, settle
from tests.services.output_processor.fakes import LENGTH, SOON, STOP, EngineStream, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.services.runtime.local_streams.channel import SILENT
from tokenloom.services.runtime.peers import retry_budget
from tokenloom.services.runtime.streams import slotted_stream as client_stream
from tokenloom.v1.engine_pb2 import AddRequest, EngineFrame, Finished
from tokenloom.v1.types_pb2 import FinishReason, PromptEmbeds

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR


def _kill(mesh: Mesh, stream: EngineStream) -> None:
    stream.frames.put_nowait(None)


def _break_columns(mesh: Mesh, stream: EngineStream) -> None:
    stream.frames.put_nowait(EngineFrame(step=1, slot=[1, 2], token_index=[0], token_ids=[5, 6]))


@pytest.mark.parametrize("how", [_kill, _break_columns])
async def test_when_an_engine_is_lost_its_requests_continue_on_another(
    mesh: Mesh, how: Callable[[Mesh, EngineStream], None]
) -> None:
    gateway = await mesh.gateway()
    stream, (first, _) = await mesh.started(gateway, submit(1), submit(2))
    stream.send((first, 0, [65, 66]))
    assert list((await gateway.next_frame()).token_ids) == [65, 66]
    how(mesh, stream)
    other = await mesh.engines[1].next_stream()
    adds = {add.request_id: add for add in await other.next_adds(2)}
    assert [list(adds[f"request-{slot}"].accepted_token_ids) for slot in (1, 2)] == [[65, 66], []]
    _finish(other, adds["request-1"], 2, [67])
    frame = await gateway.next_frame()
    assert (list(frame.slot), list(frame.token_index), list(frame.token_ids)) == ([1], [2], [67])
    (end,) = frame.finished
    assert (end.reason, end.completion_tokens, end.attempts) == (LENGTH, 3, 2)
    assert not frame.engine_death_slots, "two requests were live, so none of them is blamed"
    await gateway.send(submit=[submit(3)])
    assert len(await (await mesh.engines[0].next_stream()).next_adds(1)) == 1, "a new stream serves the next"


def _finish(stream: EngineStream, add: AddRequest, index: int, ids: list[int]) -> None:
    end = Finished(slot=add.slot, reason=LENGTH, num_output_tokens=index + len(ids))
    stream.send((add.slot, index, ids), finished=[end])


async def test_a_silent_engine_is_dead(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(client_stream, "SILENCE_SECONDS", 0.8)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    other = await mesh.engines[1].next_stream()
    assert len(await other.next_adds(1)) == 1
    await asyncio.wait_for(stream.ended.wait(), SOON)


async def test_a_request_is_not_blamed_for_connections_that_are_reset(mesh: Mesh) -> None:
    """Its engines run on, and say hello again under the same incarnation."""
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    for turn in (1, 0, 1):
        stream.lose("Connection reset by peer")
        stream = await mesh.engines[turn].next_stream()
        (add,) = await stream.next_adds(1)
    _finish(stream, add, 0, [65])
    frame = await gateway.next_frame()
    assert (frame.finished[0].attempts, list(frame.engine_death_slots)) == (4, [])


async def test_an_engine_that_comes_back_under_another_incarnation_has_died(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    mesh.engines[0].identity.epoch += 100
    stream.lose("Connection reset by peer")
    assert list((await gateway.next_frame()).engine_death_slots) == [1]


async def test_a_request_is_not_blamed_for_silence(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be frozen, or the link cut: the request is tried again, however often."""
    monkeypatch.setattr(client_stream, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(client_stream, "SILENCE_SECONDS", 0.8)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    for turn in (1, 0):
        pass_time(2.0)
        stream = await mesh.engines[turn].next_stream()
        adds = await stream.next_adds(1)
    stream.send((adds[0].slot, 0, [65]), finished=[Finished(slot=adds[0].slot, reason=STOP, num_output_tokens=1)])
    assert (await gateway.until_finished(1))[2].reason == STOP


@pytest.mark.parametrize("hang_timeout", [0.3])
async def test_an_engine_whose_step_stands_still_is_hung(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "LOOK_SECONDS", 0.02)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    beats = asyncio.create_task(_beat(stream))
    try:
        assert len(await (await mesh.engines[1].next_stream()).next_adds(1)) == 1
    finally:
        beats.cancel()


@pytest.mark.parametrize("hang_timeout", [0.1])
async def test_the_step_of_a_paused_engine_may_stand_still(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "LOOK_SECONDS", 0.02)
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


async def test_a_request_waits_for_an_engine(mesh: Mesh) -> None:
    """It is placed as soon as a snapshot shows the engine, and not only when the next poll is due."""
    engines, mesh.coordinator.engines = mesh.coordinator.engines, []
    mesh.coordinator.error = Unavailable("No engine is serving this model now; retry.")
    mesh.coordinator.publish()
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1)])
    for _ in range(6):  # by now the next poll is due in a second
        await mesh.coordinator.next_pick()
    mesh.coordinator.engines, mesh.coordinator.error = engines, None
    mesh.coordinator.publish()
    assert len(await (await mesh.engines[0].next_stream()).next_adds(1)) == 1


TRY_ELSEWHERE = {"code": 14, "reason": "TRY_ELSEWHERE", "message": "the engine drains"}
FULL = {"code": 8, "reason": "RESOURCE_EXHAUSTED", "message": "the engine is full", "retry_after": {"seconds": 3}}


async def test_an_engine_that_drains_passes_its_requests_on(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    end = Finished(slot=slot, reason=ERROR, num_output_tokens=2, error=TRY_ELSEWHERE)
    stream.send((slot, 0, [65, 66]), finished=[end])
    other = await mesh.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    assert list(add.accepted_token_ids) == [65, 66]
    assert [each.engine_id for each in mesh.coordinator.requests[-1].exclude] == ["engine-0"]
    _finish(other, add, 2, [67])
    _, ids, finished = await gateway.until_finished(1)
    assert (ids, finished.reason, finished.attempts) == ([65, 66, 67], LENGTH, 2)


async def test_an_engine_that_is_full_passes_a_new_request_to_one_with_room(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send(finished=[Finished(slot=slot, reason=ERROR, error=FULL)])
    assert len(await (await mesh.engines[1].next_stream()).next_adds(1)) == 1


async def test_without_a_budget_a_new_request_asks_no_second_engine(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send(finished=[Finished(slot=slot, reason=ERROR, error=FULL)])
    error = (await gateway.until_finished(1))[2].error
    assert (error.reason, error.message) == ("RESOURCE_EXHAUSTED", "the engine is full")
    assert len(mesh.coordinator.requests) == 1


async def test_without_a_budget_requests_of_dead_engines_move(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1), submit(2))  # one alone would be blamed
    for turn in (1, 0, 1):  # nothing is lost, however often its engine dies
        mesh.engines[turn].is_gone = False
        stream.die()
        stream = await mesh.engines[turn].next_stream()
        assert len(await stream.next_adds(2)) == 2


def _send_nothing(stream: EngineStream) -> None:
    """The link counts the ticks without a frame."""


def _lose_connection(stream: EngineStream) -> None:
    stream.lose(SILENT)


@pytest.mark.parametrize("fall_silent", [_send_nothing, _lose_connection])
async def test_a_request_whose_engines_fall_silent_one_after_the_other_waits_for_the_budget(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, fall_silent: Callable[[EngineStream], None]
) -> None:
    monkeypatch.setattr(client_stream, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(client_stream, "SILENCE_SECONDS", 0.8)
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1), submit(2))
    fall_silent(stream)
    other = await mesh.engines[1].next_stream()
    assert len(await other.next_adds(2)) == 2, "the first retry is free"
    fall_silent(other)
    await asyncio.wait_for(other.ended.wait(), SOON)
    num_picks = len(mesh.coordinator.requests)
    for _ in range(4):
        pass_time(2.0)
        await settle()
    assert len(mesh.coordinator.requests) == num_picks
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 1.0)
    pass_time(2.0)
    assert len(await (await mesh.engines[0].next_stream()).next_adds(1)) == 1


async def test_requests_of_an_engine_that_was_silent_need_no_budget_once_it_is_back(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all engines had been starved twice within seconds, their requests went on one a second."""
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    monkeypatch.setattr(client_stream, "SILENCE_SECONDS", 1000.0)  # the test says which one is silent
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1), submit(2))
    stream.lose(SILENT)
    other = await mesh.engines[1].next_stream()
    await other.next_adds(2)
    other.lose(SILENT)
    await asyncio.wait_for(other.ended.wait(), SOON)
    mesh.coordinator.engines.reverse()
    await gateway.send(submit=[submit(3)])
    back = await mesh.engines[1].next_stream()
    assert [add.request_id for add in await back.next_adds(1)] == ["request-3"]
    assert {add.request_id for add in await back.next_adds(2)} == {"request-1", "request-2"}


async def test_when_every_engine_is_full_a_new_request_ends_with_the_overload(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    mesh.coordinator.error = Unavailable("No engine is serving this model now; retry.")
    mesh.coordinator.engines = []
    mesh.coordinator.publish()
    await mesh.coordinator.published()
    stream.send(finished=[Finished(slot=slot, reason=ERROR, error=FULL)])
    error = (await gateway.until_finished(1))[2].error
    assert (error.reason, error.message, error.retry_after.seconds) == ("RESOURCE_EXHAUSTED", "the engine is full", 3)


async def test_a_request_that_has_begun_waits_for_room(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send((slot, 0, [65]))
    await gateway.next_frame()
    stream.die()
    other = await mesh.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    mesh.coordinator.error = ResourceExhausted("every engine is full")
    other.send(finished=[Finished(slot=add.slot, reason=ERROR, num_output_tokens=1, error=FULL)])
    for _ in range(4):
        await mesh.coordinator.next_pick()
    mesh.engines[0].is_gone = False
    mesh.coordinator.error = None
    again = await (await mesh.engines[0].next_stream()).next_adds(1)
    assert list(again[0].accepted_token_ids) == [65]


async def test_every_sample_continues_by_itself(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=2, seed=7)])
    stream = await mesh.engines[0].next_stream()
    first, second = await stream.next_adds(2)
    stream.send((first.slot, 0, [65]), (second.slot, 0, [70, 71]))
    assert list((await gateway.next_frame()).token_ids) == [65, 70, 71]
    stream.die()
    other = await mesh.engines[1].next_stream()
    adds = await other.next_adds(2)
    accepted = {add.sampling_params.seed: list(add.accepted_token_ids) for add in adds}
    assert accepted == {first.sampling_params.seed: [65], second.sampling_params.seed: [70, 71]}
    frame = await gateway.next_frame()
    assert list(frame.engine_death_slots) == [1], "one death of one request, though two samples report it"


async def test_embeddings_are_sent_again(mesh: Mesh) -> None:
    embeds = PromptEmbeds(position=1, num_tokens=1, rows=b"\0" * 16)
    request = submit(1)
    request.prompt.embeds.append(embeds)
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, request)
    stream.send((slot, 0, [65]))
    await gateway.next_frame()
    stream.die()
    (add,) = await (await mesh.engines[1].next_stream()).next_adds(1)
    assert (list(add.prompt.embeds), list(add.accepted_token_ids)) == ([embeds], [65])


async def test_requests_of_other_output_processors_are_company_too(mesh: Mesh) -> None:
    mesh.coordinator.running = 2  # more than this output processor has there
    mesh.coordinator.publish()
    await mesh.coordinator.published()
    gateway = await mesh.gateway()
    stream, _ = await mesh.started(gateway, submit(1))
    for engine in (1, 0, 1):
        mesh.engines[engine].is_gone = False
        stream.die()
        stream = await mesh.engines[engine].next_stream()
        (add,) = await stream.next_adds(1)
    _finish(stream, add, 0, [65])
    frame = await gateway.next_frame()
    assert (frame.finished[0].attempts, list(frame.engine_death_slots)) == (4, [])
