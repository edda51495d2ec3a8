"""A request in two legs: prefill, hand-over, decode; and what becomes of it when engines die or nobody wants it."""

from dataclasses import dataclass

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.services.output_processor.fakes import LENGTH, STOP, EngineStream, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.services.runtime.errors import ResourceExhausted, Unavailable
from tokenloom.v1.coordinator_pb2 import PickRequest
from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVSource
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


async def test_the_first_token_comes_from_the_prefill_engine_and_the_rest_from_the_decode_engine(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill = await prefilling(mesh, timeout=Duration(seconds=60), priority=2)
    assert (prefill.add.hold_kv, prefill.add.HasField("kv_source"), prefill.add.awaits_tokens) == (True, False, False)
    kv = prefill.stream.prefilled(prefill.slot, 0, ids[:1], cached_tokens=2, queued_ns=30, prefill_ns=40)
    first = await gateway.next_frame()
    assert (list(first.token_ids), list(first.token_index)) == (ids[:1], [0])

    decode = await part(mesh, 2)
    add = decode.add
    assert (add.kv_source, list(add.accepted_token_ids), add.hold_kv, add.awaits_tokens) == (kv, ids[:1], False, False)
    assert (list(add.prompt.token_ids), add.priority, add.sampling_params.seed) == ([5, 6, 7], 2, 1)
    assert 55 < add.timeout.ToTimedelta().total_seconds() <= 60
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
    mesh.coordinator.engines[0].fingerprint.weights = b"w"
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
    gateway, prefill = await prefilling(mesh, timeout=Duration(nanos=300_000_000))
    mesh.coordinator.hold.clear()
    prefill.stream.prefilled(prefill.slot, 0, [5])
    assert (await gateway.until_finished(1))[2].error.reason == "DEADLINE_EXCEEDED"
    await prefill.aborted()
    mesh.coordinator.hold.set()


# Engines that die


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


async def test_a_decode_engine_that_dies_later_ends_the_request_retryably(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, _, decode = await decoding(mesh, ids)
    decode.stream.send((decode.slot, 1, ids[1:2]))
    decode.stream.die()
    _, _, finished = await gateway.until_finished(1)
    assert (finished.reason, finished.error.reason) == (ERROR, "UNAVAILABLE")
    assert finished.error.HasField("retry_after")


async def test_a_request_does_not_take_a_third_engine_down(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    prefill.stream.die()
    second = await part(mesh, 1)
    second.stream.prefilled(second.slot, 0, [5])
    decode = await part(mesh, 2)
    decode.stream.die()
    _, _, finished = await gateway.until_finished(1)
    assert (finished.error.reason, finished.attempts) == ("UNAVAILABLE", 2)
    await second.aborted()


async def test_deaths_of_earlier_attempts_count(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh, engine_deaths=1)
    prefill.stream.die()
    assert (await gateway.until_finished(1))[2].error.reason == "UNAVAILABLE"


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


async def test_a_prefill_without_its_token_ends_the_request_and_drops_the_kv(mesh: Mesh) -> None:
    gateway, prefill = await prefilling(mesh)
    prefill.stream.prefilled(prefill.slot, 0, [], num_output_tokens=0)
    assert (await gateway.until_finished(1))[2].error.reason == "INTERNAL"
    await prefill.aborted()


async def test_without_the_coordinator_legs_go_by_the_last_snapshot(mesh: Mesh) -> None:
    mesh.coordinator.error = Unavailable("away")
    gateway, prefill = await prefilling(mesh)
    assert prefill.add.hold_kv
    prefill.stream.prefilled(prefill.slot, 0, [5])
    decode = await part(mesh, 2)
    assert not decode.add.HasField("pick")
    decode.finish(1)
    assert (await gateway.until_finished(1))[2].reason == LENGTH
