"""Tests requests in two legs whose engines die."""

import pytest

from tests.services.output_processor.fakes import LENGTH, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import DECODE, ERROR, Part, decoding, part, part_at_any, prefilling, roles
from tokenloom.request.errors import Unavailable
from tokenloom.v1.coordinator_pb2 import PickRequest
from tokenloom.v1.engine_pb2 import Finished, KVSource

__all__ = ["roles"]  # a fixture


def excluded(request: PickRequest) -> list[str]:
    return [each.engine_id for each in request.exclude]


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_prefill_engine_that_dies_is_replaced(mesh: Mesh, is_long: bool) -> None:
    ids = mesh.ids("Once upon")
    gateway, prefill = await prefilling(mesh)
    if is_long:
        prefill.stream.grant(prefill.slot)
        decode = await part(mesh, 2)
    prefill.stream.die()
    assert list((await gateway.next_frame()).engine_death_slots) == [1]
    if is_long:
        await decode.aborted()  # it waits for a token that never comes
    second = await part(mesh, 1)
    assert (second.add.hold_kv, list(second.add.accepted_token_ids)) == (True, [])
    assert excluded(mesh.coordinator.requests[-1]) == ["engine-0"]
    second.stream.prefilled(second.slot, 0, ids[:1])
    if is_long:
        (add,) = await decode.stream.next_adds(1)
    else:
        decode = await part(mesh, 2)
        add = decode.add
    assert (list(add.accepted_token_ids), add.awaits_tokens) == (ids[:1], False)
    decode.stream.send((add.slot, 1, ids[1:]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=2)])
    text, got, finished = await gateway.until_finished(1)
    assert (text, got, finished.attempts) == (mesh.tokenizer.decode(ids), ids, 2)


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_first_token_that_was_seen_is_not_sampled_again(mesh: Mesh, is_long: bool) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill = await prefilling(mesh)
    if is_long:
        prefill.stream.grant(prefill.slot)
        ahead = await part(mesh, 2)
    prefill.stream.send((prefill.slot, 0, ids[:1]))
    assert list((await gateway.next_frame()).token_ids) == ids[:1]
    prefill.stream.die()
    second = await part(mesh, 1)
    assert list(second.add.accepted_token_ids) == ids[:1]
    if is_long:
        await ahead.aborted()
        second.stream.grant(second.slot)
        (add,) = await ahead.stream.next_adds(1)
        assert (list(add.accepted_token_ids), add.awaits_tokens) == (ids[:1], True)
        second.stream.prefilled(second.slot, 1, ids[1:2])
        (accept,) = (await ahead.stream.next_input()).accept
        assert list(accept.token_ids) == ids[1:2]
        decode = Part(ahead.stream, add)
    else:
        second.stream.prefilled(second.slot, 1, ids[1:2])
        decode = await part(mesh, 2)
        assert list(decode.add.accepted_token_ids) == ids[:2]
    decode.finish(2)
    _, got, finished = await gateway.until_finished(1)
    assert (got[-1:], finished.completion_tokens) == (ids[1:2], 2)


async def test_a_prefill_engine_that_dies_after_the_hand_over_has_no_effect(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon")
    gateway, prefill, decode = await decoding(mesh, ids)
    prefill.stream.die()
    decode.stream.send((decode.slot, 1, ids[1:]))
    decode.finish(2)
    _, got, finished = await gateway.until_finished(1)
    assert (got, finished.reason, finished.attempts) == (ids[1:], LENGTH, 1)


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_decode_engine_that_dies_before_its_first_token_is_replaced(mesh: Mesh, is_long: bool) -> None:
    ids = mesh.ids("Once upon")
    gateway, prefill = await prefilling(mesh)
    kv = kv_of(prefill, is_long, ids)
    (await part(mesh, 2)).stream.die()
    second = await part(mesh, 3)
    assert second.add.kv_source == kv, "another may take the lease over"
    assert (list(second.add.accepted_token_ids), second.add.awaits_tokens) == ([] if is_long else ids[:1], is_long)
    assert excluded(mesh.coordinator.requests[-1]) == ["engine-2"]
    if is_long:
        prefill.stream.prefilled(prefill.slot, 0, ids[:1])
        assert len((await second.stream.next_input()).accept) == 1
    second.stream.send((second.slot, 1, ids[1:]))
    second.finish(2)
    _, got, finished = await gateway.until_finished(1)
    assert (got[-1], finished.reason, finished.attempts) == (ids[1], LENGTH, 2)


def kv_of(prefill: Part, is_long: bool, ids: list[int]) -> KVSource:
    if is_long:
        return prefill.stream.grant(prefill.slot)
    return prefill.stream.prefilled(prefill.slot, 0, ids[:1])


async def test_a_decode_engine_that_dies_later_is_replaced_from_the_beginning(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time there")
    gateway, prefill, decode = await decoding(mesh, ids)
    decode.stream.send((decode.slot, 1, ids[1:2]))
    assert list((await gateway.next_frame()).token_ids) == ids[1:2]
    decode.stream.die()
    (add,) = await prefill.stream.next_adds(1)
    assert (add.hold_kv, list(add.accepted_token_ids), add.HasField("kv_source")) == (True, ids[:2], False)
    assert mesh.coordinator.requests[-1].prompt_tokens == 5
    prefill.stream.prefilled(add.slot, 2, ids[2:3])
    second = await part(mesh, 3)
    assert (list(second.add.accepted_token_ids), second.add.kv_source.lease_id[0]) == (ids[:3], add.slot)
    second.stream.send((second.slot, 3, ids[3:4]))
    second.finish(4)
    _, got, finished = await gateway.until_finished(1)
    assert (got, finished.reason, finished.attempts) == (ids[2:4], LENGTH, 2)


async def test_an_engine_that_drains_passes_a_decode_leg_on(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill, decode = await decoding(mesh, ids)
    decode.stream.send((decode.slot, 1, ids[1:2]), finished=[drained(decode.slot, 2)])
    (add,) = await prefill.stream.next_adds(1)
    assert list(add.accepted_token_ids) == ids[:2]
    prefill.stream.prefilled(add.slot, 2, ids[2:3], error=None)
    last = await part(mesh, 3)
    last.finish(3)
    _, got, finished = await gateway.until_finished(1)
    assert (got, finished.attempts) == (ids[1:3], 2)


async def test_a_decode_leg_that_is_refused_leaves_the_lease_to_the_next(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, _, decode = await decoding(mesh, ids)
    decode.stream.send(finished=[drained(decode.slot, 1)])
    second = await part(mesh, 3)
    assert second.add.kv_source == decode.add.kv_source
    second.finish(1)
    assert (await gateway.until_finished(1))[2].attempts == 2


def drained(slot: int, num_tokens: int) -> Finished:
    error = {"code": 14, "reason": "TRY_ELSEWHERE", "message": "the engine drains"}
    return Finished(slot=slot, reason=ERROR, num_output_tokens=num_tokens, error=error)


async def test_a_request_that_is_alone_does_not_take_a_third_engine_down(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    prefill.stream.die()
    second = await part(mesh, 1)
    second.stream.prefilled(second.slot, 0, [5])
    decode = await part(mesh, 2)
    decode.stream.die()
    _, _, finished = await gateway.until_finished(1)
    assert (finished.error.reason, finished.attempts) == ("ENGINE_KILLER", 2)
    await second.aborted()


async def test_a_core_that_died_with_only_this_request_counts_too(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    error = {"code": 14, "reason": "ENGINE_DIED", "message": "the engine failed"}
    prefill.finish(0, ERROR, error=error)
    assert list((await gateway.next_frame()).engine_death_slots) == [1]
    (await part(mesh, 1)).finish(0, ERROR, error=error)
    frame = await gateway.next_frame()
    assert (list(frame.engine_death_slots), frame.finished[0].error.reason) == ([1], "ENGINE_KILLER")


async def test_bystanders_are_not_blamed(mesh: Mesh) -> None:
    """Requests that share their engines survive any number of deaths."""
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1), submit(2)])
    for engine in mesh.engines[:3]:
        stream = await engine.next_stream()
        assert len(await stream.next_adds(2)) == 2
        stream.die()
    adds = await (await mesh.engines[3].next_stream()).next_adds(2)
    assert {add.request_id for add in adds} == {"request-1", "request-2"}


async def test_deaths_that_an_earlier_output_processor_saw_count(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh, engine_deaths=1)
    prefill.stream.die()
    assert (await gateway.until_finished(1))[2].error.reason == "ENGINE_KILLER"
    await gateway.send(submit=[submit(2, engine_deaths=2)])
    assert (await gateway.until_finished(2))[2].error.reason == "ENGINE_KILLER"


async def test_without_another_prefill_engine_a_decode_engine_does_all(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    mesh.coordinator.roles = [DECODE] * 4  # the other prefill engine left, too
    prefill.stream.die()
    second = await part(mesh, 1)
    assert not second.add.hold_kv
    second.stream.send((second.slot, 0, [5]))
    second.finish(1)
    assert (await gateway.until_finished(1))[2].reason == LENGTH


async def test_an_error_of_the_prefill_engine_is_the_requests(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    error = {"code": 3, "message": "no", "reason": "INVALID_ARGUMENT"}
    prefill.finish(0, ERROR, error=error)
    assert (await gateway.until_finished(1))[2].error.message == "no"


async def test_a_prefill_without_its_token_drops_the_kv_and_is_made_elsewhere(mesh: Mesh) -> None:
    _, prefill = await prefilling(mesh)
    prefill.stream.prefilled(prefill.slot, 0, [], num_output_tokens=0)
    assert set((await prefill.stream.next_input()).abort_slots) == {prefill.slot}
    assert (await part_at_any(mesh, 1)).add.hold_kv


async def test_without_the_coordinator_legs_go_by_the_last_snapshot(mesh: Mesh) -> None:
    mesh.coordinator.error = Unavailable("away")
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1)])
    prefill = await part_at_any(mesh, 0, 1)  # a request without a prefix draws its engines
    assert prefill.add.hold_kv
    prefill.stream.prefilled(prefill.slot, 0, [5])
    decode = await part_at_any(mesh, 2, 3)
    assert not decode.add.HasField("pick")
    decode.finish(1)
    assert (await gateway.until_finished(1))[2].reason == LENGTH
