"""Runs requests in two legs: prefill, hand-over, decode; and cancels them at every stage."""

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.loop_clock import pass_time
from tests.services.output_processor.fakes import LENGTH, SOON, STOP, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import (
    ABORT,
    BOTH,
    DECODE,
    PREFILL,
    decoding,
    nothing_live,
    part,
    picks,
    prefilling,
    roles,
)
from tokenloom.request.errors import EngineKiller, ResourceExhausted, WeightsReplaced
from tokenloom.services.output_processor.placement.engine_search import Lifetime
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import Finished, KVSource, SessionTurn
from tokenloom.v1.output_processor_pb2 import KVHandover
from tokenloom.v1.types_pb2 import Fingerprint

__all__ = ["roles"]  # a fixture


async def test_the_first_token_comes_from_the_prefill_engine_and_the_rest_from_the_decode_engine(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill = await prefilling(mesh, timeout=Duration(seconds=60), priority=2, tenant="someone")
    assert (prefill.add.hold_kv, prefill.add.HasField("kv_source"), prefill.add.awaits_tokens) == (True, False, False)
    kv = prefill.stream.prefilled(prefill.slot, 0, ids[:1], cached_tokens=2, queued_ns=30, prefill_ns=40)
    first = await gateway.next_frame()
    assert (list(first.token_ids), list(first.token_index)) == (ids[:1], [0])

    decode = await part(mesh, 2)
    add = decode.add
    assert (add.kv_source, list(add.accepted_token_ids), add.hold_kv, add.awaits_tokens) == (kv, ids[:1], False, False)
    assert (list(add.prompt.token_ids), add.priority, add.sampling_params.seed) == ([5, 6, 7], 2, 1)
    assert (prefill.add.tenant, add.tenant) == ("someone", "someone")
    assert 30 < add.timeout.ToTimedelta().total_seconds() <= 60
    assert (prefill.add.pick.number, add.pick.number) == (1, 2)
    decode.stream.send((decode.slot, 1, ids[1:]))
    decode.finish(len(ids), kv_wait_ns=50, queued_ns=999, prefill_ns=999, cached_tokens=3)

    text, got, finished = await gateway.until_finished(1)
    assert ("".join(first.text) + text, got) == ("Once upon a time", ids[1:])
    assert (finished.reason, finished.completion_tokens, finished.cached_tokens, finished.attempts) == (
        LENGTH,
        len(ids),
        2,
        1,
    )
    timeline = finished.timeline
    assert (timeline.queued_ns, timeline.prefill_ns, timeline.kv_transfer_ns) == (30, 40, 50)
    assert (timeline.prefill_engine, timeline.decode_engine) == ("engine-0", "engine-2")
    await nothing_live(gateway, prefill.stream)


async def test_each_leg_is_picked_when_it_is_due_and_within_the_pool_of_the_first(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon")
    for engine in mesh.coordinator.engines:
        engine.fingerprint.weights = b"w"
    mesh.coordinator.engines[0].fingerprint.kv_layout = "HND"
    _, prefill = await prefilling(mesh, block_hash_prefixes=[3, 4])
    assert picks(mesh) == [PREFILL]
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    await part(mesh, 2)
    first, second = mesh.coordinator.requests
    assert (first.role, second.role) == (PREFILL, DECODE)
    assert (first.prompt_tokens, second.prompt_tokens) == (3, 4)
    assert list(first.block_hash_prefixes) == list(second.block_hash_prefixes) == [3, 4]
    assert (first.fingerprint.weights, second.fingerprint.weights, second.fingerprint.kv_layout) == (b"", b"w", "HND")


async def test_the_second_half_of_a_peers_request_stays_in_the_pool_of_the_first(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon")
    first, other = mesh.coordinator.engines[0], mesh.coordinator.engines[2]
    for engine in mesh.coordinator.engines:
        engine.fingerprint.MergeFrom(Fingerprint(weights=b"w", kv_layout="HND", block_size=16, numerics="a"))
    other.fingerprint.numerics = "b"  # which only an operator allows
    mesh.coordinator.publish()
    await mesh.coordinator.published()
    gateway = await mesh.gateway()
    kv = KVSource(engine_id=first.engine_id, engine_epoch=first.epoch, lease_id=bytes(16), num_tokens=3)
    await gateway.send(submit=[submit(1, kv_transfer=KVHandover(source=kv, first_token_id=ids[0]))])
    decode = await part(mesh, 2)
    assert [pick.fingerprint for pick in mesh.coordinator.requests] == [first.fingerprint]
    assert (decode.add.kv_source, list(decode.add.accepted_token_ids)) == (kv, ids[:1])
    decode.stream.send((decode.slot, 1, ids[1:]))
    decode.finish(len(ids))
    _, got, finished = await gateway.until_finished(1)
    assert got == ids
    assert finished.timeline.mixed_numerics


async def halved(mesh: Mesh) -> tuple[Gateway, EngineIdentity]:
    """Sends the second half of a peer's request, whose first half had weights that its engine has replaced since.
    Another engine has them still. Returns that of the first half."""
    first, other = mesh.coordinator.engines[0], mesh.coordinator.engines[2]
    for engine in mesh.coordinator.engines:
        engine.fingerprint.MergeFrom(Fingerprint(weights=b"new", kv_layout="HND", block_size=16, numerics="a"))
    other.fingerprint.weights = b"old"
    mesh.coordinator.publish()
    await mesh.coordinator.published()
    gateway = await mesh.gateway()
    epoch = first.epoch
    kv = KVSource(engine_id=first.engine_id, engine_epoch=epoch, lease_id=bytes(16), num_tokens=3, weights=b"old")
    token_id = mesh.ids("Once upon")[0]
    await gateway.send(submit=[submit(1, kv_transfer=KVHandover(source=kv, first_token_id=token_id))])
    return gateway, first


async def test_the_second_half_of_a_peers_request_has_the_weights_of_the_first(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon")
    gateway, first = await halved(mesh)
    decode = await part(mesh, 2)
    wanted = Fingerprint()
    wanted.CopyFrom(first.fingerprint)
    wanted.weights = b"old"
    assert [pick.fingerprint for pick in mesh.coordinator.requests] == [wanted]
    decode.stream.send((decode.slot, 1, ids[1:]))
    decode.finish(len(ids))
    _, got, finished = await gateway.until_finished(1)
    assert (got, finished.weights_version) == (ids, b"old".hex())


async def test_the_second_half_of_a_peers_request_ends_when_no_engine_has_its_weights(mesh: Mesh) -> None:
    mesh.coordinator.error = WeightsReplaced("no engine has them any more")
    gateway, _ = await halved(mesh)
    finished = (await gateway.until_finished(1))[2]
    assert (finished.error.reason, finished.weights_version) == ("WEIGHTS_REPLACED", b"old".hex())


async def test_both_legs_name_the_turn_of_the_session(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon")
    _, prefill = await prefilling(mesh, session=9, keep_seconds=300)
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    decode = await part(mesh, 2)
    assert [(pick.session, pick.keep_seconds) for pick in mesh.coordinator.requests] == [(9, 300)] * 2
    assert prefill.add.session == decode.add.session == SessionTurn(branch=9, keep_seconds=300)


async def test_a_request_without_a_session_names_none(mesh: Mesh) -> None:
    _, prefill = await prefilling(mesh)
    assert not prefill.add.HasField("session")


async def test_a_long_prefill_is_read_while_it_runs(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill = await prefilling(mesh)
    kv = prefill.stream.grant(prefill.slot)
    decode = await part(mesh, 2)
    assert (decode.add.kv_source, decode.add.awaits_tokens, list(decode.add.accepted_token_ids)) == (kv, True, [])
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    (accept,) = (await decode.stream.next_input()).accept
    assert (accept.slot, list(accept.token_ids)) == (decode.slot, ids[:1])
    decode.stream.send((decode.slot, 1, ids[1:]))
    decode.finish(len(ids))
    text, got, _ = await gateway.until_finished(1)
    assert (text, got) == ("Once upon a time", ids)
    assert picks(mesh) == [PREFILL, DECODE]


async def test_a_prefill_that_ends_while_its_decode_leg_is_being_placed(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon")
    gateway, prefill = await prefilling(mesh)
    mesh.coordinator.hold.clear()
    prefill.stream.grant(prefill.slot)
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    await gateway.next_frame()
    mesh.coordinator.hold.set()
    decode = await part(mesh, 2)
    assert (list(decode.add.accepted_token_ids), decode.add.awaits_tokens) == (ids[:1], False)
    assert picks(mesh) == [PREFILL, DECODE]


@pytest.mark.parametrize("is_heard_late", [False, True])
async def test_a_decode_leg_that_cannot_be_placed_early_is_placed_when_it_is_due(
    mesh: Mesh, is_heard_late: bool
) -> None:
    ids = mesh.ids("Once upon")
    gateway, prefill = await prefilling(mesh)
    mesh.coordinator.error = ResourceExhausted("full")
    if is_heard_late:
        mesh.coordinator.hold.clear()
    prefill.stream.grant(prefill.slot)
    assert [(await mesh.coordinator.next_pick()).role for _ in range(2)] == [PREFILL, DECODE]
    mesh.coordinator.error = None
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    assert list((await gateway.next_frame()).token_ids) == ids[:1]
    mesh.coordinator.hold.set()
    decode = await part(mesh, 2)
    assert list(decode.add.accepted_token_ids) == ids[:1]
    decode.finish(1)
    assert (await gateway.until_finished(1))[2].reason == LENGTH


async def test_a_sample_whose_request_has_killed_engines_elsewhere_ends_and_counts_its_own_attempt(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sample has lost them. The decode leg is refused early, and once more when it is due."""
    ids = mesh.ids("Once upon")
    gateway, prefill = await prefilling(mesh)

    refused = asyncio.Event()

    async def settled(_: Lifetime) -> None:
        refused.set()
        raise EngineKiller("The engine died 2 times.")

    monkeypatch.setattr(Lifetime, "settled", settled)
    prefill.stream.grant(prefill.slot)
    await asyncio.wait_for(refused.wait(), SOON)
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    _, _, finished = await gateway.until_finished(1)
    assert (finished.error.reason, finished.attempts) == (EngineKiller.reason, 1)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("roles", [[BOTH]])
async def test_an_engine_that_goes_on_itself_finds_the_kv_in_its_cache(mesh: Mesh, is_long: bool) -> None:
    mesh.coordinator.roles = [PREFILL]  # so that it does not offer to do everything
    ids = mesh.ids("Once upon")
    gateway, prefill = await prefilling(mesh)
    if is_long:
        prefill.stream.grant(prefill.slot)
        assert [(await mesh.coordinator.next_pick()).role for _ in range(2)] == [PREFILL, DECODE]
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    message = await prefill.stream.next_input()
    (add,) = message.add
    assert not add.HasField("kv_source")
    assert (list(add.accepted_token_ids), add.hold_kv, add.awaits_tokens) == (ids[:1], False, False)
    assert list(message.abort_slots) == [prefill.slot], "the lease is dropped after the blocks are shared"
    prefill.stream.send((add.slot, 1, ids[1:]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=2)])
    text, got, finished = await gateway.until_finished(1)
    assert (text, got) == (mesh.tokenizer.decode(ids), ids)
    assert finished.timeline.decode_engine == "engine-0"


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_first_token_that_ends_the_request_is_not_handed_over(mesh: Mesh, is_long: bool) -> None:
    (word,) = mesh.ids("t")
    gateway, prefill = await prefilling(mesh, max_tokens=1)
    decode = None
    if is_long:
        prefill.stream.grant(prefill.slot)
        decode = await part(mesh, 2)
    prefill.stream.send((prefill.slot, 0, [word]))
    prefill.finish(1, queued_ns=3)
    text, got, finished = await gateway.until_finished(1)
    assert (text, got, finished.reason, finished.timeline.queued_ns) == ("t", [word], LENGTH, 3)
    if decode is not None:
        await decode.aborted()


async def test_a_stop_string_in_the_first_token_drops_the_kv(mesh: Mesh) -> None:
    (word,) = mesh.ids("t")
    gateway, prefill = await prefilling(mesh, stop=["t"])
    prefill.stream.prefilled(prefill.slot, 0, [word])
    message = await prefill.stream.next_input()
    assert ([each.slot for each in message.stop_at], list(message.abort_slots)) == ([prefill.slot], [prefill.slot])
    _, _, finished = await gateway.until_finished(1)
    assert (finished.reason, finished.stop_reason) == (STOP, "t")
    assert picks(mesh) == [PREFILL]


async def test_a_stop_string_across_the_legs_is_found(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill = await prefilling(mesh, stop=["ce up"])
    prefill.stream.prefilled(prefill.slot, 0, ids[:1])
    decode = await part(mesh, 2)
    decode.stream.send((decode.slot, 1, ids[1:]))
    ((stop_at),) = (await decode.stream.next_input()).stop_at
    decode.finish(stop_at.num_tokens, STOP)
    text, got, finished = await gateway.until_finished(1)
    assert (text, finished.stop_reason, len(got)) == ("On", "ce up", stop_at.num_tokens)


# Cancelled at every stage


async def test_cancel_while_the_prompt_is_computed(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    await gateway.send(cancel_slots=[1])
    await prefill.aborted()
    assert (await gateway.until_finished(1))[2].reason == ABORT


async def test_cancel_while_the_kv_is_read_ahead_frees_both_engines(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    prefill.stream.grant(prefill.slot)
    decode = await part(mesh, 2)
    await gateway.send(cancel_slots=[1])
    await prefill.aborted()
    await decode.aborted()


@pytest.mark.parametrize("is_long", [False, True])
async def test_cancel_while_the_decode_leg_is_placed_drops_the_kv(mesh: Mesh, is_long: bool) -> None:
    gateway, prefill = await prefilling(mesh)
    mesh.coordinator.hold.clear()
    if is_long:
        prefill.stream.grant(prefill.slot)
    prefill.stream.prefilled(prefill.slot, 0, [5])
    await gateway.next_frame()
    await gateway.send(cancel_slots=[1])
    await prefill.aborted()
    mesh.coordinator.hold.set()
    await nothing_live(gateway, prefill.stream)
    assert mesh.engines[2].streams.empty() or (await mesh.engines[2].next_stream()).inputs.empty()


async def test_cancel_before_the_kv_was_used_frees_both_engines(mesh: Mesh) -> None:
    gateway, prefill, decode = await decoding(mesh, mesh.ids("Once upon"))
    await gateway.send(cancel_slots=[1])
    await prefill.aborted()
    await decode.aborted()


async def test_cancel_while_it_decodes_leaves_the_prefill_engine_alone(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill, decode = await decoding(mesh, ids)
    decode.stream.send((decode.slot, 1, ids[1:2]))
    await gateway.next_frame()
    await gateway.send(cancel_slots=[1])
    await decode.aborted()
    await nothing_live(gateway, prefill.stream)


async def test_the_deadline_between_the_legs_drops_the_kv(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh, timeout=Duration(seconds=20))
    mesh.coordinator.hold.clear()
    prefill.stream.prefilled(prefill.slot, 0, [5])
    async with asyncio.timeout(SOON):
        while len(mesh.coordinator.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    pass_time(20)
    assert (await gateway.until_finished(1))[2].error.reason == "DEADLINE_EXCEEDED"
    await prefill.aborted()
    mesh.coordinator.hold.set()
