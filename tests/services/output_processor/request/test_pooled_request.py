"""Tests requests that generate nothing: their results are passed on, and an engine's death costs nothing of them."""

import struct

import pytest

from tests.services.output_processor.fakes import STOP, VOCAB_SIZE, EngineStream, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import part_at_any
from tokenloom.request.errors import QueryLost
from tokenloom.request.wire_errors import to_proto
from tokenloom.services.output_processor.request import outbox
from tokenloom.v1.engine_pb2 import EngineFrame, Finished
from tokenloom.v1.output_processor_pb2 import RequestFinished, Submit
from tokenloom.v1.types_pb2 import (
    FinishReason,
    LateInteraction,
    Pooled,
    PoolingParams,
    PoolingTask,
    Prompt,
)

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR
EMBED = PoolingParams(task=PoolingTask.POOLING_TASK_EMBED)


def _pooling(slot: int, params: PoolingParams = EMBED) -> Submit:
    return Submit(
        slot=slot,
        request_id=f"request-{slot}",
        prompt=Prompt(token_ids=[5, 6, 7]),
        pooling_params=params,
        tenant="acme",
        priority=3,
    )


def _floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def _pool(stream: EngineStream, slot: int, *numbers: float, offset: int = 0, total: int = 0, ends: bool = True) -> None:
    shape = [total or offset + len(numbers)]
    part = Pooled(slot=slot, shape=shape, offset=offset, data=_floats(*numbers))
    end = [Finished(slot=slot, reason=STOP, cached_tokens=2, queued_ns=5, prefill_ns=7)] if ends else []
    stream.step += 1
    stream.frames.put_nowait(EngineFrame(step=stream.step, pooled=[part], finished=end))


async def _until_finished(gateway: Gateway, slot: int) -> tuple[list[Pooled], RequestFinished]:
    parts: list[Pooled] = []
    while True:
        frame = await gateway.next_frame()
        parts += frame.pooled
        for finished in frame.finished:
            assert finished.slot == slot
            return parts, finished


async def _begun(mesh: Mesh, gateway: Gateway, *submits: Submit) -> tuple[EngineStream, list[int]]:
    """Submit, and return the first engine's stream with the attempts' slots."""
    await gateway.send(submit=submits)
    stream = await mesh.engines[0].next_stream()
    return stream, [add.slot for add in await stream.next_adds(len(submits))]


async def test_a_result_is_passed_on_with_the_gateways_slot(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[_pooling(9)])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    assert (add.WhichOneof("task"), add.pooling_params) == ("pooling_params", EMBED)
    assert (add.tenant, add.priority, add.pick.coordinator_epoch) == ("acme", 3, 7)
    assert (list(add.prompt.token_ids), add.request_id) == ([5, 6, 7], "request-9")
    pick = mesh.coordinator.requests[-1]
    assert (pick.pools, pick.query_id, pick.max_new_tokens) == (True, "", 0)
    _pool(stream, add.slot, 0.5, -1.0)
    (part,), finished = await _until_finished(gateway, 9)
    assert part == Pooled(slot=9, shape=[2], data=_floats(0.5, -1.0))
    assert (finished.reason, finished.prompt_tokens, finished.cached_tokens, finished.attempts) == (STOP, 3, 2, 1)
    timeline = finished.timeline
    assert (timeline.queued_ns, timeline.prefill_ns, timeline.prefill_engine) == (5, 7, "engine-0")


async def test_when_an_engine_is_lost_another_one_begins_anew(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot, _) = await _begun(mesh, gateway, _pooling(1), _pooling(2))
    _pool(stream, slot, 0.5, total=2, ends=False)
    assert [part.offset for part in (await gateway.next_frame()).pooled] == [0]
    stream.die()
    other = await mesh.engines[1].next_stream()
    adds = {add.request_id: add.slot for add in await other.next_adds(2)}
    _pool(other, adds["request-1"], 0.25, 0.75)
    parts, finished = await _until_finished(gateway, 1)
    assert [(part.offset, part.data) for part in parts] == [(0, _floats(0.25, 0.75))], "the gateway begins anew at 0"
    assert (finished.reason, finished.attempts) == (STOP, 2)


async def test_a_request_that_kills_engines_ends(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, _ = await _begun(mesh, gateway, _pooling(1))
    stream.die()
    assert list((await gateway.next_frame()).engine_death_slots) == [1]
    other = await mesh.engines[1].next_stream()
    await other.next_adds(1)
    other.die()
    _, finished = await _until_finished(gateway, 1)
    assert (finished.reason, finished.error.reason) == (ERROR, "ENGINE_KILLER")


async def test_a_cancelled_request_ends_on_its_engine(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1))
    await gateway.send(cancel_slots=[1])
    assert list((await stream.next_input()).abort_slots) == [slot]
    assert (await _until_finished(gateway, 1))[1].reason == ABORT


async def test_the_end_of_the_stream_ends_its_requests(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1))
    gateway.close()
    assert list((await stream.next_input()).abort_slots) == [slot]


async def test_a_request_ends_at_its_deadline(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    late = _pooling(1)
    late.timeout.FromMilliseconds(100)
    await _begun(mesh, gateway, late)
    assert (await _until_finished(gateway, 1))[1].error.reason == "DEADLINE_EXCEEDED"


async def test_errors_of_the_engine_reach_the_gateway(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    late = LateInteraction(query_id="ab12")
    document = PoolingParams(task=PoolingTask.POOLING_TASK_TOKEN_EMBED, late_interaction=late)
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1, document))
    assert mesh.coordinator.requests[-1].query_id == "ab12"
    stream.send(finished=[Finished(slot=slot, reason=ERROR, error=to_proto(QueryLost("gone")))])
    assert (await _until_finished(gateway, 1))[1].error.reason == "QUERY_LOST"


async def test_tokens_for_a_pooling_request_move_it(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1))
    stream.send((slot, 0, [65]))
    assert (await part_at_any(mesh, 0, 1)).add.HasField("pooling_params")


async def test_a_result_beyond_its_shape_moves_it(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1))
    stream.frames.put_nowait(EngineFrame(step=1, pooled=[Pooled(slot=slot, shape=[1], data=_floats(1, 2))]))
    assert (await part_at_any(mesh, 0, 1)).add.HasField("pooling_params")


@pytest.mark.parametrize("offset", [1, 3])
async def test_a_result_with_a_gap_or_without_its_end_moves_it(mesh: Mesh, offset: int) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1))
    _pool(stream, slot, 0.5, total=4, ends=False)
    _pool(stream, slot, 0.5, offset=offset, total=4)
    other = await part_at_any(mesh, 0, 1)
    _pool(other.stream, other.slot, 0.25, 0.75)
    parts, finished = await _until_finished(gateway, 1)
    assert (parts[-1].data, finished.reason) == (_floats(0.25, 0.75), STOP)


async def test_a_vector_may_be_wider_than_the_vocabulary_of_its_model(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await _begun(mesh, gateway, _pooling(1))
    _pool(stream, slot, 0.5, total=4 * VOCAB_SIZE, ends=False)
    assert [list(part.shape) for part in (await gateway.next_frame()).pooled] == [[4 * VOCAB_SIZE]]


async def test_a_result_for_a_generation_moves_it(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    _pool(stream, slot, 0.5, ends=False)
    assert not (await part_at_any(mesh, 0, 1)).add.HasField("pooling_params")


async def test_large_results_take_several_frames_and_end_with_the_last(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "POOLED_BYTES", 12)
    gateway = await mesh.gateway()
    stream, (first, second) = await _begun(mesh, gateway, _pooling(1), _pooling(2))
    parts = [
        Pooled(slot=first, shape=[5], data=_floats(1, 2)),
        Pooled(slot=first, shape=[5], offset=2, data=_floats(3, 4, 5)),
        Pooled(slot=second, shape=[1], data=_floats(6)),
    ]
    ends = [Finished(slot=slot, reason=STOP) for slot in (first, second)]
    stream.frames.put_nowait(EngineFrame(step=1, pooled=parts, finished=ends))
    frames = [await gateway.next_frame() for _ in range(3)]
    assert [[len(part.data) for part in frame.pooled] for frame in frames] == [[8], [12], [4]]
    assert [[end.slot for end in frame.finished] for frame in frames] == [[], [1], [2]]
