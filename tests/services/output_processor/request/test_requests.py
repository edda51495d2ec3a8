"""Tests the limit of live requests, and several samples of one prompt: one pick, one message and one lease, but seeds
and ends of their own."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from tests.loop_clock import pass_time
from tests.services.output_processor.fakes import LENGTH, SOON, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.request.errors import TryElsewhere, Unavailable
from tokenloom.request.sampling_params import sample_seed
from tokenloom.services.output_processor.placement import engine_search as lifetime
from tokenloom.services.output_processor.request.kept_requests import KeptRequests
from tokenloom.services.output_processor.request.outbox import Outbox
from tokenloom.services.output_processor.request.requests import LiveRequestLimit, Requests, SampleGroup
from tokenloom.services.output_processor.request.telemetry import OutputProcessorMetrics
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.services.runtime.peers.retry_budget import RetryBudget
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.engine_pb2 import AddRequest, EngineInput, Finished
from tokenloom.v1.output_processor_pb2 import RequestFinished
from tokenloom.v1.types_pb2 import EngineRole, FinishReason

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR
PREFILL, DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


def seeds(adds: list[AddRequest]) -> list[int]:
    return [add.sampling_params.seed for add in adds]


async def outputs(gateway: Gateway, count: int) -> tuple[dict[int, list[int]], dict[int, RequestFinished]]:
    """Tokens and ends of every sample of slot 1."""
    ids: dict[int, list[int]] = {}
    ends: dict[int, RequestFinished] = {}
    while len(ends) < count:
        frame = await gateway.next_frame()
        tokens = iter(frame.token_ids)
        counts = list(frame.num_tokens) or [1] * len(frame.slot)
        samples = list(frame.sample_index) or [0] * len(frame.slot)
        for slot, sample, index, number in zip(frame.slot, samples, frame.token_index, counts, strict=True):
            known = ids.setdefault(sample, [])
            assert (slot, index) == (1, len(known))
            known += [next(tokens) for _ in range(number)]
        for finished in frame.finished:
            assert finished.slot == 1
            assert finished.sample_index not in ends
            ends[finished.sample_index] = finished
    return ids, ends


async def test_samples_go_out_in_one_message_with_seeds_of_their_own(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=3, seed=9, tenant="someone")])
    stream = await mesh.engines[0].next_stream()
    adds = list((await stream.next_input()).add)
    assert seeds(adds) == [sample_seed(9, index) for index in range(3)]
    assert [add.tenant for add in adds] == ["someone"] * 3
    assert [add.HasField("pick") for add in adds] == [True, False, False]
    assert len(mesh.coordinator.requests) == 1
    slots = [add.slot for add in adds]
    stream.send(*((slot, 0, [slot]) for slot in slots))
    stream.send(*((slot, 1, [slot, slot]) for slot in slots[1:]))
    stream.send(
        finished=[
            Finished(slot=slot, reason=LENGTH, num_output_tokens=number)
            for slot, number in zip(slots, (1, 3, 3), strict=True)
        ]
    )
    ids, ends = await outputs(gateway, 3)
    assert ids == {0: slots[:1], 1: [slots[1]] * 3, 2: [slots[2]] * 3}
    assert [ends[index].completion_tokens for index in range(3)] == [1, 3, 3]


async def test_sample_0_sends_the_prompts_logprobs_before_any_other_begins(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=3, prompt_logprobs=0)])
    stream = await mesh.engines[0].next_stream()
    (first,) = await stream.next_adds(1)
    assert first.sampling_params.HasField("prompt_logprobs")
    stream.send((first.slot, 0, [7]))
    others = list((await stream.next_input()).add)
    assert [add.sampling_params.HasField("prompt_logprobs") for add in others] == [False, False]


async def test_cancelling_aborts_every_sample(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, slots = await started(mesh, gateway, num_samples=3)
    await gateway.send(cancel_slots=[1])
    aborted: list[int] = []
    while len(aborted) < 3:
        aborted += (await stream.next_input()).abort_slots
    assert sorted(aborted) == slots
    _, ends = await outputs(gateway, 3)
    assert {end.reason for end in ends.values()} == {ABORT}


async def test_one_deadline_ends_them_all(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await started(mesh, gateway, num_samples=3, timeout=Duration(seconds=20))
    pass_time(20)
    _, ends = await outputs(gateway, 3)
    assert {end.error.reason for end in ends.values()} == {"DEADLINE_EXCEEDED"}


async def test_a_request_that_cannot_be_placed_fails_as_a_whole(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_GIVE_UP_SECONDS", 100.0)  # between the last attempt and the deadline
    mesh.coordinator.error = Unavailable("none")
    gateway = await mesh.gateway()
    for engine in mesh.servers:
        await engine.kill()
    await gateway.send(submit=[submit(1, num_samples=3, timeout=Duration(seconds=400))])
    await mesh.coordinator.next_pick()
    pass_time(320)
    _, ends = await outputs(gateway, 3)
    assert {end.error.reason for end in ends.values()} == {"UNAVAILABLE"}, "and not DEADLINE_EXCEEDED"
    assert ends[0].error.message.startswith("No engine could take the request before its deadline.")


async def started(mesh: Mesh, gateway: Gateway, **fields: object) -> tuple[object, list[int]]:
    await gateway.send(submit=[submit(1, **fields)])  # type: ignore[arg-type]
    stream = await mesh.engines[0].next_stream()
    return stream, [add.slot for add in await stream.next_adds(3)]


@pytest.mark.parametrize("roles", [[PREFILL, DECODE]])
async def test_one_lease_serves_all(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=3, seed=9)])
    prefill = await mesh.engines[0].next_stream()
    (add,) = await prefill.next_adds(1)
    kv = prefill.prefilled(add.slot, 0, ids[:1])
    decode = await mesh.engines[1].next_stream()
    (first,) = await decode.next_adds(1)
    assert first.kv_source == kv
    decode.send((first.slot, 1, ids[1:2]))
    others = list((await decode.next_input()).add)
    assert seeds(others) == [sample_seed(9, 1), sample_seed(9, 2)]
    for each in others:
        assert not each.HasField("kv_source")
        assert not each.hold_kv
        assert not each.accepted_token_ids
    assert [request.role for request in mesh.coordinator.requests] == [PREFILL, DECODE]
    decode.send(*((each.slot, 0, [each.slot]) for each in others))
    decode.send(
        finished=[
            Finished(slot=first.slot, reason=LENGTH, num_output_tokens=2),
            *(Finished(slot=each.slot, reason=LENGTH, num_output_tokens=1) for each in others),
        ]
    )
    got, _ = await outputs(gateway, 3)
    assert got == {0: ids[:2], 1: [others[0].slot], 2: [others[1].slot]}


@pytest.mark.parametrize("roles", [[PREFILL, DECODE]])
async def test_a_first_token_that_ends_sample_0_leaves_the_others_to_go_their_own_way(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=3)])
    prefill = await mesh.engines[0].next_stream()
    (add,) = await prefill.next_adds(1)
    prefill.send((add.slot, 0, [7]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=1)])
    others = await prefill.next_adds(2)
    assert all(each.hold_kv for each in others)
    for each in others:
        prefill.send((each.slot, 0, [8]), finished=[Finished(slot=each.slot, reason=LENGTH, num_output_tokens=1)])
    got, ends = await outputs(gateway, 3)
    assert got == {0: [7], 1: [8], 2: [8]}
    assert {end.reason for end in ends.values()} == {LENGTH}


@pytest.mark.parametrize("roles", [[PREFILL, DECODE]])
async def test_cancelling_before_sample_0_has_settled(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=3)])
    prefill = await mesh.engines[0].next_stream()
    (add,) = await prefill.next_adds(1)
    await gateway.send(cancel_slots=[1])
    assert await prefill.next_input() == EngineInput(abort_slots=[add.slot])
    got, ends = await outputs(gateway, 3)
    assert (got, {end.reason for end in ends.values()}) == ({}, {ABORT})


MAX_BYTES = 1 << 20


class NoPlacer:
    """Has no answer, and nothing to release."""

    budget = RetryBudget(lambda: 0.0)

    def ask(self, _: object) -> object:
        return self

    def at_once(self, _: object) -> None:
        return None

    def is_open(self, *_: object) -> bool:
        return False

    def is_shared(self, *_: object) -> bool:
        return False

    def check(self, *_: object) -> None:
        """No link ends."""

    async def place(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()


class Bounded:
    """Requests of which few may be live."""

    def __init__(self, tokenizer: Tokenizer, max_requests: int) -> None:
        metrics = OutputProcessorMetrics(CollectorRegistry(), lambda: 0, lambda: 0)
        placer: Any = NoPlacer()
        kept = KeptRequests[SampleGroup](lambda error: None, 60, 1 << 20)
        self.requests = Requests(
            placer,
            Vocabulary(tokenizer),
            frozenset(),
            metrics,
            limit=LiveRequestLimit(max_requests, MAX_BYTES),
            kept=kept,
        )
        self.tasks = Tasks(lambda error: None)
        self.ended: list[int] = []

    def start(self, slot: int = 1, prompt: Sequence[int] = (5, 6, 7)) -> SampleGroup:
        group = self.requests.make(submit(slot, prompt), Outbox(lambda: None), self.tasks, self.ended.append)
        group.start()
        return group


async def test_no_pick_is_asked_for_where_the_only_engine_is_open(
    byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, asked = object(), list[object]()
    monkeypatch.setattr(NoPlacer, "at_once", lambda _, __: attempt)
    monkeypatch.setattr(NoPlacer, "ask", lambda _, one: asked.append(one))
    bounded = Bounded(byte_level_tokenizer, 1)
    assert bounded.requests.ask(submit(1)) is attempt
    assert not asked
    taken_over = submit(2)
    taken_over.take_over = True  # it may be running here already
    assert bounded.requests.ask(taken_over) is None


async def test_the_bound_is_retryable_and_an_end_makes_room(byte_level_tokenizer: Tokenizer) -> None:
    bounded = Bounded(byte_level_tokenizer, 1)
    assert bounded.requests.ask(submit(1)) is not None
    assert bounded.requests.ask(submit(1, num_samples=2)) is None
    group = bounded.start(1)
    assert bounded.requests.ask(submit(2)) is None
    with pytest.raises(TryElsewhere) as failure:
        bounded.start(2)
    assert failure.value.retry_after is not None
    group.cancel()
    assert bounded.ended == [1]
    bounded.start(3)
    assert bounded.requests.num_live == 1
    await bounded.tasks.close()


async def test_a_request_that_its_gateway_submits_again_takes_its_own_place(byte_level_tokenizer: Tokenizer) -> None:
    """It was refused for the place that it had itself, without its gateway."""
    bounded, request = Bounded(byte_level_tokenizer, 1), submit(1)
    request.fingerprint = b"body"
    group = bounded.requests.make(request, Outbox(lambda: None), bounded.tasks, bounded.ended.append)
    group.start()
    assert bounded.requests.kept.lose(group, ("gateway-0", 1))
    again = bounded.requests.make(request, Outbox(lambda: None), bounded.tasks, bounded.ended.append)
    assert (group.is_over, bounded.requests.num_live) == (True, 1)
    with pytest.raises(TryElsewhere):
        bounded.start(2)
    again.cancel()
    await bounded.requests.kept.close()
    await bounded.tasks.close()


async def test_draining_takes_no_new_requests_and_waits_for_the_live_ones(byte_level_tokenizer: Tokenizer) -> None:
    bounded = Bounded(byte_level_tokenizer, 4)
    group = bounded.start(1)
    drained = asyncio.create_task(bounded.requests.drain())
    await asyncio.sleep(0)
    assert bounded.requests.ask(submit(2)) is None
    with pytest.raises(TryElsewhere):
        bounded.start(2)
    assert not drained.done()
    group.cancel()
    await asyncio.wait_for(drained, SOON)
    await bounded.tasks.close()


async def test_draining_with_no_live_request_ends_at_once(byte_level_tokenizer: Tokenizer) -> None:
    await asyncio.wait_for(Bounded(byte_level_tokenizer, 4).requests.drain(), SOON)


async def test_prompts_are_bounded_by_their_bytes_and_an_end_makes_room(byte_level_tokenizer: Tokenizer) -> None:
    bounded = Bounded(byte_level_tokenizer, 100)
    prompt = [1] * (MAX_BYTES // 8 // 4)  # with a message to the engine, a quarter of what there is room for
    groups = [bounded.start(slot, prompt) for slot in range(1, 5)]
    assert bounded.requests.ask(submit(5)) is None, "no pick is asked for"
    with pytest.raises(TryElsewhere, match="prompts already fill 1 MiB") as failure:
        bounded.start(5)
    assert failure.value.retry_after is not None
    groups[0].cancel()
    assert bounded.requests.ask(submit(5)) is not None
    bounded.start(5)
    await bounded.tasks.close()


async def test_every_sample_may_take_a_message_of_its_own(byte_level_tokenizer: Tokenizer) -> None:
    bounded = Bounded(byte_level_tokenizer, 100)
    bounded.start()
    prompt = [1] * (MAX_BYTES // 8)
    assert bounded.requests.ask(submit(2, prompt, num_samples=2)) is None
    assert bounded.requests.ask(submit(2, prompt[3:])) is not None
    await bounded.tasks.close()


async def test_a_prompt_over_the_limit_runs_alone(byte_level_tokenizer: Tokenizer) -> None:
    bounded = Bounded(byte_level_tokenizer, 100)
    group = bounded.start(1, [1] * MAX_BYTES)
    assert bounded.requests.ask(submit(2)) is None
    group.cancel()
    assert bounded.requests.num_live == 0
    bounded.start(2)
    await bounded.tasks.close()
