"""Tests the contract of ``OutputProcessor.Process`` from the gateway's side, with a fake engine and coordinator."""

import asyncio
from collections import Counter
from itertools import chain
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.loop_clock import pass_time
from tests.services.output_processor.fakes import LENGTH, SOON, STOP, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import part_at_any
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.request import errors
from tokenloom.request.packed_ids import pack
from tokenloom.services.output_processor import gateway_stream
from tokenloom.services.output_processor.gateway_stream import own_copy
from tokenloom.services.output_processor.placement.engine_link import FEWEST_OTHERS
from tokenloom.services.output_processor.text.detokenizer import Detokenizer, StopMatch
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.streams import slotted_stream as server_stream
from tokenloom.v1.engine_pb2 import Finished, SlotLogprobs
from tokenloom.v1.output_processor_pb2 import ProcessFrame, SampleJournal, Submit
from tokenloom.v1.types_pb2 import FinishReason, Logprobs

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR


async def test_tokens_become_text_and_the_end_says_what_was_used(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    ids = mesh.ids("Once upon a time")
    for i, token_id in enumerate(ids):
        stream.send((slot, i, [token_id]))
    stream.send(
        finished=[
            Finished(slot=slot, reason=LENGTH, num_output_tokens=len(ids), cached_tokens=2, queued_ns=30, prefill_ns=40)
        ]
    )
    text, got, finished = await gateway.until_finished(1)
    assert (text, got) == ("Once upon a time", ids)
    assert (finished.reason, finished.stop_reason, finished.attempts) == (LENGTH, "", 1)
    assert (finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens) == (3, len(ids), 2)
    timeline = finished.timeline
    assert (timeline.queued_ns, timeline.prefill_ns) == (30, 40)
    assert timeline.placement_ns > 0
    assert timeline.detokenize_ns > 0
    assert (timeline.prefill_engine, timeline.decode_engine) == ("engine-0", "engine-0")


async def test_a_first_token_is_sent_before_the_tokens_of_others_become_text(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    numbers = list(range(1, FEWEST_OTHERS + 3))
    stream, slots = await mesh.started(gateway, *map(submit, numbers))

    async def frames(count: int) -> list[list[int]]:
        """The slots of the next frames, which are several where the machine is busy."""
        found: list[list[int]] = []
        while sum(map(len, found)) < count:
            found.append(list((await gateway.next_frame()).slot))
        return found

    stream.send(*((slot, 0, [5]) for slot in slots[2:]))
    assert list(chain.from_iterable(await frames(len(slots) - 2))) == numbers[2:]
    stream.send(*((slot, 0, [5]) for slot in slots[:2]), *((slot, 1, [7]) for slot in slots[2:]))
    found = await frames(len(slots))
    assert list(chain.from_iterable(found)) == numbers
    assert not any(numbers[1] in each and numbers[2] in each for each in found)


async def test_a_first_token_is_sent_before_the_next_frame_becomes_text(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (first, second) = await mesh.started(gateway, submit(1), submit(2))
    stream.send((first, 0, [5]))  # both frames are here before either is read
    stream.send((second, 0, [6]))
    assert [list((await gateway.next_frame()).slot) for _ in range(2)] == [[1], [2]]


@pytest.mark.parametrize("is_old", [False, True])
async def test_engines_get_packed_ids_if_they_read_them(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    if is_old:
        monkeypatch.setattr(hello, "PACKED_IDS", "another feature")  # as the engine's hello has it
    gateway, packed = await mesh.gateway(), submit(1, [])
    packed.prompt.packed_token_ids = pack([9, 8, 7])
    await gateway.send(submit=[packed])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    assert mesh.coordinator.requests[-1].prompt_tokens == 3
    assert list(add.prompt.token_ids) == ([9, 8, 7] if is_old else [])
    assert add.prompt.packed_token_ids == (b"" if is_old else pack([9, 8, 7]))
    stream.send(finished=[Finished(slot=add.slot, reason=LENGTH)])
    assert (await gateway.until_finished(1))[2].prompt_tokens == 3


async def test_torn_packed_ids_cost_one_request(mesh: Mesh) -> None:
    gateway, torn = await mesh.gateway(), submit(1, [])
    torn.prompt.packed_token_ids = b"12345"
    await gateway.send(submit=[torn])
    error = (await gateway.until_finished(1))[2].error
    assert (error.reason, error.field) == (errors.InvalidArgument.reason, "packed_token_ids")
    _, (slot,) = await mesh.started(gateway, submit(2))
    assert slot


async def test_the_engine_gets_the_request_with_its_pick_and_what_is_left_of_its_time(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(
        submit=[submit(1, [9, 8], temperature=0.5, priority=3, timeout=Duration(seconds=60), tenant="someone")]
    )
    (add,) = await (await mesh.engines[0].next_stream()).next_adds(1)
    assert (list(add.prompt.token_ids), add.sampling_params.temperature, add.priority) == ([9, 8], 0.5, 3)
    assert (add.tenant, add.pick.coordinator_epoch, add.pick.number) == ("someone", 7, 1)
    assert 30 < add.timeout.ToTimedelta().total_seconds() <= 60
    (pick,) = mesh.coordinator.requests
    assert (pick.prompt_tokens, pick.tenant, pick.fingerprint.model) == (2, "someone", DEMO_MODEL_NAME)


async def test_a_burst_does_not_hold_up_the_requests_that_run(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, made_in = 0, list[int]()
    make = gateway_stream.GatewayStream._submit

    def counted(session: gateway_stream.GatewayStream, *arguments: Any) -> None:
        made_in.append(turns)
        make(session, *arguments)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(gateway_stream.GatewayStream, "_submit", counted)
    gateway = await mesh.gateway()
    counting = asyncio.create_task(count())
    await gateway.send(submit=[submit(slot) for slot in range(1, 101)])
    await (await mesh.engines[0].next_stream()).next_adds(100)
    counting.cancel()
    assert len(made_in) == 100
    assert max(Counter(made_in).values()) <= gateway_stream.SUBMITS_PER_TURN


async def test_a_request_that_is_refused_had_its_engine_asked_for_in_vain(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    mesh.coordinator.error = errors.ResourceExhausted("every engine is full")
    bad = submit(1)
    bad.ClearField("task")
    await gateway.send(submit=[bad])
    _, _, finished = await gateway.until_finished(1)
    assert (finished.reason, finished.error.field) == (ERROR, "sampling_params")
    await mesh.coordinator.next_pick()
    mesh.coordinator.error = None
    _, slots = await mesh.started(gateway, submit(2))
    assert len(slots) == 1


async def test_a_step_for_several_requests_is_one_frame(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, slots = await mesh.started(gateway, submit(1), submit(2), submit(3))
    a, b = mesh.ids("a")[0], mesh.ids("b")[0]
    stream.send((slots[0], 0, [a]), (slots[1], 0, [b, a]), (slots[2], 0, [b]))
    frame = await gateway.next_frame()
    rows = dict(zip(frame.slot, zip(frame.text, frame.num_tokens, strict=True), strict=True))
    assert rows == {1: ("a", 1), 2: ("ba", 2), 3: ("b", 1)}
    assert list(frame.token_index) == [0, 0, 0]
    assert len(frame.token_ids) == 4


async def test_a_stop_string_ends_the_request_where_it_was_completed(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, stop=["upon"]))
    ids = mesh.ids("Once upon a time")
    stream.send((slot, 0, ids))
    message = await stream.next_input()
    ((stop_at),) = message.stop_at
    remain = next(n for n in range(len(ids)) if "upon" in mesh.tokenizer.decode(ids[:n]))
    assert (stop_at.slot, stop_at.num_tokens) == (slot, remain)
    # The engine had gone on meanwhile, and even finished for another reason: neither counts.
    stream.send((slot, len(ids), ids), finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=2 * len(ids))])
    text, got, finished = await gateway.until_finished(1)
    assert (text, got) == ("Once ", ids[:remain])
    assert (finished.reason, finished.stop_reason, finished.completion_tokens) == (STOP, "upon", remain)


async def test_a_stop_string_stands_when_the_engine_dies_before_confirming_it(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, stop=["upon"]))
    stream.send((slot, 0, mesh.ids("Once upon a time")))
    await stream.next_input()
    stream.frames.put_nowait(None)
    text, _, finished = await gateway.until_finished(1)
    assert (text, finished.reason, finished.stop_reason) == ("Once ", STOP, "upon")


@pytest.mark.parametrize("ends_with_eos", [True, False])
async def test_a_stop_token_is_counted_not_shown_and_named_unless_it_is_eos(mesh: Mesh, ends_with_eos: bool) -> None:
    (word,) = mesh.ids("t")
    last = CheckpointInfo.load(DEMO_MODEL).eos_token_ids[0] if ends_with_eos else mesh.ids("x")[0]
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, stop_token_ids=[last], skip_special_tokens=False))
    end = Finished(slot=slot, reason=STOP, num_output_tokens=2, stop_token_id=last)
    stream.send((slot, 0, [word, last]), finished=[end])
    text, got, finished = await gateway.until_finished(1)
    assert (text, got, finished.completion_tokens) == ("t", [word, last], 2)
    assert finished.stop_reason == ("" if ends_with_eos else str(last))


async def test_text_held_for_a_stop_string_comes_with_the_end(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, stop=["time flies"]))
    ids = mesh.ids("a time")
    stream.send((slot, 0, ids))
    first = await gateway.next_frame()
    assert list(first.text) == ["a "]
    assert list(first.token_ids) == ids
    stream.send(finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=len(ids))])
    text, _, _ = await gateway.until_finished(1)
    assert text == "time"


async def test_cancel_aborts_at_the_engine_and_is_answered_once(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    await gateway.send(cancel_slots=[1, 1, 99])
    assert list((await stream.next_input()).abort_slots) == [slot]
    stream.send((slot, 0, [5]), finished=[Finished(slot=slot, reason=ABORT)])
    frame = await gateway.next_frame()
    assert [(end.slot, end.reason) for end in frame.finished] == [(1, ABORT)]
    await gateway.send(submit=[submit(2)])
    (add,) = await stream.next_adds(1)
    stream.send(finished=[Finished(slot=add.slot, reason=LENGTH)])
    assert [end.slot for end in (await gateway.next_frame()).finished] == [2], "nothing more was said of slot 1"


async def test_the_end_of_the_stream_aborts_its_requests_and_no_others(mesh: Mesh) -> None:
    leaving, staying = await mesh.gateway(), await mesh.gateway()
    stream, (slot,) = await mesh.started(leaving, submit(1))
    await staying.send(submit=[submit(1)])
    (other,) = await stream.next_adds(1)
    leaving.close()
    assert list((await stream.next_input()).abort_slots) == [slot]
    stream.send(finished=[Finished(slot=other.slot, reason=LENGTH)])
    assert (await staying.until_finished(1))[2].reason == LENGTH


async def test_half_close_lets_live_requests_end(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    await gateway.call.done_writing()
    stream.send(finished=[Finished(slot=slot, reason=LENGTH)])
    assert (await gateway.until_finished(1))[2].reason == LENGTH
    assert await asyncio.wait_for(gateway.call.read(), SOON) is grpc.aio.EOF


async def test_a_bad_request_ends_alone(mesh: Mesh) -> None:
    """Sampling parameters are checked at the public edge and by the engine, not here."""
    gateway = await mesh.gateway()
    bad = submit(2, num_samples=2, journals=[SampleJournal(sample_index=2)])
    await gateway.send(submit=[submit(1), bad])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    (finished,) = (await gateway.next_frame()).finished
    assert (finished.slot, finished.reason) == (2, ERROR)
    assert (finished.error.code, finished.error.field) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "journals")
    stream.send(finished=[Finished(slot=add.slot, reason=LENGTH)])
    assert (await gateway.until_finished(1))[2].reason == LENGTH


async def test_the_deadline_ends_a_request_here_and_at_the_engine(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, timeout=Duration(seconds=20)))
    pass_time(20)
    _, _, finished = await gateway.until_finished(1)
    assert (finished.reason, finished.error.reason) == (ERROR, "DEADLINE_EXCEEDED")
    assert list((await stream.next_input()).abort_slots) == [slot]


@pytest.mark.parametrize("heartbeat", [0.2])
async def test_without_credit_steps_are_merged(mesh: Mesh) -> None:
    gateway = await mesh.gateway(credit=1)
    stream, (slot,) = await mesh.started(gateway, submit(1))
    ids = mesh.ids("Once upon a time")
    stream.send((slot, 0, ids[:1]))
    assert list((await gateway.next_frame()).token_ids) == ids[:1]
    for i in range(1, len(ids)):
        stream.send((slot, i, [ids[i]]))
    stream.send(finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=len(ids))])
    for _ in range(2):  # heartbeats come without credit; by the second one the steps above have arrived
        assert await gateway.read() == ProcessFrame()
    await gateway.send(credit=1)
    frame = await gateway.next_frame()
    assert (list(frame.token_index), list(frame.token_ids)) == ([1], ids[1:])
    assert [end.completion_tokens for end in frame.finished] == [len(ids)]


@pytest.mark.parametrize("heartbeat", [0.02])
async def test_a_gateway_that_grants_no_credit_is_given_up(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_stream, "NO_CREDIT_SECONDS", 0.4)
    gateway = await mesh.gateway(credit=0)
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send((slot, 0, mesh.ids("Once")[:1]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.next_frame()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("heartbeat", [0.1])
async def test_live_slots_without_news_bring_heartbeats(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await mesh.started(gateway, submit(1))
    assert await gateway.read() == ProcessFrame()


async def test_tokens_of_an_earlier_attempt_count_and_their_text_is_not_repeated(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    ids = mesh.ids("Once upon a time")
    await gateway.send(submit=[submit(1, journals=[SampleJournal(token_ids=ids[:2], emitted_text_bytes=3)])])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    assert list(add.accepted_token_ids) == ids[:2]
    stream.send((add.slot, 2, ids[2:]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=len(ids))])
    text, got, finished = await gateway.until_finished(1)
    assert (text, got) == ("Once upon a time"[3:], ids[2:])
    assert finished.completion_tokens == len(ids)


async def test_a_gap_in_the_tokens_moves_that_request_only(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, slots = await mesh.started(gateway, submit(1), submit(2))
    stream.send((slots[0], 1, [5]), (slots[1], 0, [5]))
    frame = await gateway.next_frame()
    assert (list(frame.finished), list(frame.slot)) == ([], [2])
    assert list((await stream.next_input()).abort_slots) == [slots[0]]


async def test_a_bug_of_ours_in_one_request_ends_that_request_only(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Detokenizer.step

    def fail(self: Detokenizer, token_ids: list[int], *, ends_with_stop_token: bool) -> tuple[str, StopMatch | None]:
        if token_ids == [7]:
            raise RuntimeError("a bug")
        return step(self, token_ids, ends_with_stop_token=ends_with_stop_token)

    monkeypatch.setattr(Detokenizer, "step", fail)
    gateway = await mesh.gateway()
    stream, slots = await mesh.started(gateway, submit(1), submit(2))
    stream.send((slots[0], 0, [7]), (slots[1], 0, [5]))
    frame = await gateway.next_frame()
    assert [(end.slot, end.error.reason, end.error.message) for end in frame.finished] == [
        (1, "INTERNAL", "internal error")
    ]
    assert list(frame.slot) == [2]
    assert list((await stream.next_input()).abort_slots) == [slots[0]]


async def test_a_bug_of_ours_at_the_end_of_one_request_ends_that_request_only(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept the slot, and ended the output processor."""
    finish = Detokenizer.finish

    def fail(self: Detokenizer) -> str:
        if broken:
            broken.clear()
            raise RuntimeError("a bug")
        return finish(self)

    broken = [True]
    monkeypatch.setattr(Detokenizer, "finish", fail)
    gateway = await mesh.gateway()
    stream, slots = await mesh.started(gateway, submit(1), submit(2))
    ends = [Finished(slot=slot, reason=LENGTH, num_output_tokens=1) for slot in slots]
    stream.send((slots[0], 0, [7]), (slots[1], 0, [5]), finished=ends)
    ended = {end.slot: end for end in (await gateway.next_frame()).finished}  # one step is one frame
    assert (ended[1].reason, ended[1].error.reason, ended[1].error.message) == (ERROR, "INTERNAL", "internal error")
    assert ended[2].reason == LENGTH
    await gateway.call.done_writing()
    assert await asyncio.wait_for(gateway.call.read(), SOON) is grpc.aio.EOF, "no slot is left"


async def test_a_lost_tail_is_computed_again(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send((slot, 0, [5]), finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=2)])
    again = await part_at_any(mesh, 0, 1)
    assert list(again.add.accepted_token_ids) == [5]


async def test_a_slot_that_does_not_grow_ends_the_stream(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(7))
    await gateway.send(submit=[submit(7)])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await gateway.until_finished(7)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list((await stream.next_input()).abort_slots) == [slot]


async def test_a_gateway_of_another_model_is_refused(mesh: Mesh) -> None:
    gateway = Gateway(mesh.channel)
    gateway._hello.fingerprint.model = "other"
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await gateway.greet()
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "model" in (failure.value.details() or "")


async def test_logprobs_come_with_their_tokens_and_end_with_the_stop_string(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    remain = next(n for n in range(1, len(ids) + 1) if "upon" in mesh.tokenizer.decode(ids[:n]))
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, stop=["upon"], logprobs=1, prompt_logprobs=0))
    prompt = SlotLogprobs(slot=slot, prompt=True, token_index=1, logprobs=Logprobs(sampled=[-1, -2], rank=[3, 4]))
    columns = Logprobs(
        sampled=[-float(i) for i in ids], rank=[1] * len(ids), top=1, token_id=ids, logprob=[-float(i) for i in ids]
    )
    stream.send(
        (slot, 0, ids),
        logprobs=[prompt, SlotLogprobs(slot=slot, token_index=0, logprobs=columns)],
        finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=len(ids))],
    )
    frame = await gateway.next_frame()
    of_prompt, of_output = frame.logprobs
    assert (of_prompt.slot, of_prompt.prompt, of_prompt.token_index) == (1, True, 1)
    assert (list(of_prompt.logprobs.rank), len(of_prompt.sampled_text)) == ([3, 4], 2)
    assert list(of_output.logprobs.token_id) == list(frame.token_ids) == ids[:remain]
    assert b"".join(of_output.sampled_text).decode() == mesh.tokenizer.decode(ids[:remain])
    assert frame.finished[0].completion_tokens == remain


async def test_logprobs_of_other_tokens_end_the_engines_stream(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, logprobs=0))
    stream.send((slot, 0, [5, 6]), logprobs=[SlotLogprobs(slot=slot, logprobs=Logprobs(sampled=[-1], rank=[1]))])
    await asyncio.wait_for(stream.ended.wait(), SOON)
    (add,) = await (await mesh.engines[1].next_stream()).next_adds(1)
    assert not add.accepted_token_ids


async def test_token_ids_without_text(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1, detokenize=False))
    stream.send((slot, 0, [5, 6]), finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=2)])
    text, ids, finished = await gateway.until_finished(1)
    assert (text, ids, finished.reason) == ("", [5, 6], LENGTH)


async def test_a_large_prompt_is_kept_apart_from_the_message_that_brought_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def counted(one: Submit) -> Submit:
        copied.append(one.slot)
        copy = own_copy(one)
        assert copy is not one
        assert copy == one
        return copy

    monkeypatch.setattr(gateway_stream, "own_copy", counted)
    gateway = await mesh.gateway()
    embedded = submit(3)
    embedded.prompt.embeds.add(position=0, rows=bytes(4))
    await gateway.send(submit=[submit(1), submit(2, [7] * 5000), embedded, submit(4)])
    await (await mesh.engines[0].next_stream()).next_adds(4)
    assert copied == [2, 3]
