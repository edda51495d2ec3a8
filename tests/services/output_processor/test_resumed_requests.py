"""Tests requests that outlive the stream of their gateway, and continue on another one."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest

from tests.services.output_processor.fakes import LENGTH, EngineStream, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.request import errors, wire_errors
from tokenloom.request.packed_ids import pack
from tokenloom.services.output_processor.request.kept_requests import KeptRequests
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.v1.engine_pb2 import Finished, SlotLogprobs
from tokenloom.v1.output_processor_pb2 import (
    ProcessFrame,
    RecallRequest,
    RequestFinished,
    Resume,
    SampleJournal,
    SamplePosition,
    Submit,
    Withdrawal,
)
from tokenloom.v1.types_pb2 import FinishReason, Logprobs, Prompt

ABORT, ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR
TEXT = "Once upon a time, naïve"


def kept(slot: int = 1, **fields: Any) -> Submit:
    """A request that can be resumed."""
    return submit(slot, fingerprint=b"body", tenant="someone", **fields)


def resume(slot: int = 1, of: int = 1, **fields: Any) -> Resume:
    given: dict[str, Any] = {"slot": slot, "request_id": f"request-{of}", "tenant": "someone"}
    return Resume(**(given | fields))


def end(slot: int, num_tokens: int) -> list[Finished]:
    return [Finished(slot=slot, reason=LENGTH, num_output_tokens=num_tokens)]


async def collect(gateway: Gateway, num_ends: int = 1) -> tuple[dict[int, str], dict[int, list[int]], list[Any]]:
    """Return text and tokens by sample, and the ends."""
    texts, ids, ends = dict[int, str](), dict[int, list[int]](), list[RequestFinished]()
    while len(ends) < num_ends:
        frame = await gateway.next_frame()
        add(frame, texts, ids)
        ends += frame.finished
    return texts, ids, ends


def add(frame: ProcessFrame, texts: dict[int, str], ids: dict[int, list[int]]) -> None:
    tokens = list(frame.token_ids)
    counts = list(frame.num_tokens) or [1] * len(frame.slot)
    samples = list(frame.sample_index) or [0] * len(frame.slot)
    for sample, text, count in zip(samples, frame.text, counts, strict=True):
        texts[sample] = texts.get(sample, "") + text
        ids.setdefault(sample, []).extend(tokens[:count])
        del tokens[:count]


async def lost(mesh: Mesh, request: Submit, first: Sequence[int]) -> tuple[EngineStream, int]:
    """Bring a request to its first tokens and lose its gateway."""
    gateway = await mesh.gateway(peer_id="lost")
    stream, (slot,) = await mesh.started(gateway, request)
    stream.send((slot, 0, first))
    await gateway.next_frame()
    gateway.close()
    return stream, slot


async def refusal(gateway: Gateway, *, slot: int = 1, **fields: Any) -> str:
    """Return the reason for which a Resume is refused."""
    await gateway.send(resume=[resume(slot, **fields)])
    ((finished,),) = ((await gateway.next_frame()).finished,)
    assert (finished.slot, finished.reason) == (slot, ERROR)
    return finished.error.reason


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_request_continues_on_the_stream_of_another_gateway(mesh: Mesh, is_packed: bool) -> None:
    ids, request = mesh.ids(TEXT), kept()
    if is_packed:
        request.prompt.CopyFrom(Prompt(packed_token_ids=pack([5, 6, 7])))
    stream, slot = await lost(mesh, request, ids[:3])
    other = await mesh.gateway(peer_id="other")
    stream.send((slot, 3, ids[3:5]))
    await other.send(resume=[resume(fingerprint=b"body")])
    assert list((await other.next_frame()).token_ids) in (ids[:3], ids[:5])
    stream.send((slot, 5, ids[5:]), finished=end(slot, len(ids)))
    await collect(other)
    again = await mesh.gateway(peer_id="third")  # an end may have been lost with its gateway too
    await again.send(resume=[resume()])
    texts, tokens, (finished,) = await collect(again)
    assert (texts[0], tokens[0]) == (TEXT, ids)
    assert (finished.slot, finished.reason, finished.completion_tokens) == (1, LENGTH, len(ids))


@pytest.mark.parametrize("of_older_gateway", [False, True])
async def test_a_sample_that_had_ended_elsewhere_is_sent_to_a_call_that_resumes(
    mesh: Mesh, of_older_gateway: bool
) -> None:
    """Its output processor was lost, then the client's connection: the call that resumed found no such request."""
    a, b = mesh.ids("Once upon"), mesh.ids("a time")
    over = RequestFinished(slot=1, reason=LENGTH, completion_tokens=len(a), prompt_tokens=3)
    journals = [
        SampleJournal(token_ids=a, emitted_text_bytes=9, finished=True, end=None if of_older_gateway else over),
        SampleJournal(sample_index=1, token_ids=b[:1], emitted_text_bytes=1),
    ]
    gateway = await mesh.gateway()
    await gateway.send(submit=[kept(num_samples=2, journals=journals)])
    stream = await mesh.engines[0].next_stream()
    (only,) = await stream.next_adds(1)
    stream.send((only.slot, 1, b[1:]), finished=end(only.slot, len(b)))
    texts, tokens, ends = await collect(gateway)
    assert (texts, tokens, [each.sample_index for each in ends]) == ({1: " time"}, {1: b[1:]}, [1])
    other = await mesh.gateway(peer_id="other")
    if of_older_gateway:
        await other.send(resume=[resume(1, num_samples=2)])
        assert [len(each.accepted_token_ids) for each in await stream.next_adds(2)] == [0, 0], "it begins anew"
        return
    await other.send(resume=[resume(7, num_samples=2)])
    texts, tokens, ends = await collect(other, 2)
    assert (texts, tokens) == ({0: "Once upon", 1: "a time"}, {0: a, 1: b})
    assert [(each.slot, each.sample_index, each.completion_tokens) for each in ends] == [(7, 0, len(a)), (7, 1, len(b))]


@pytest.mark.parametrize("detached", [True, False])
async def test_output_is_sent_from_the_callers_position_on(mesh: Mesh, detached: bool) -> None:
    ids = mesh.ids(TEXT)
    stream, slot = await lost(mesh, kept(), ids)
    if detached:
        stream.send(finished=end(slot, len(ids)))
    data = TEXT.encode()
    for start in range(len(ids) + 1):
        num_bytes = len(mesh.tokenizer.decode(ids[:start]).encode().removesuffix("\ufffd".encode()))
        other = await mesh.gateway(peer_id=f"other-{start}")
        await other.send(resume=[resume(positions=[SamplePosition(num_tokens=start, emitted_text_bytes=num_bytes)])])
        if not detached and start == len(ids):
            stream.send(finished=end(slot, len(ids)))
        if detached or start == len(ids):
            texts, tokens, _ = await collect(other)
        else:
            texts, tokens = {}, {}
            add(await other.next_frame(), texts, tokens)
        assert (texts.get(0, "").encode(), tokens.get(0, [])) == (data[num_bytes:], ids[start:])


async def test_samples_have_positions_of_their_own(mesh: Mesh) -> None:
    gateway = await mesh.gateway(peer_id="lost")
    await gateway.send(submit=[kept(num_samples=2)])
    stream = await mesh.engines[0].next_stream()
    first, second = await stream.next_adds(2)
    a, b = mesh.ids("Once upon"), mesh.ids("a time")
    stream.send((first.slot, 0, a), (second.slot, 0, b))
    await gateway.next_frame()
    gateway.close()
    other = await mesh.gateway(peer_id="other")
    position = SamplePosition(sample_index=1, num_tokens=1, emitted_text_bytes=1)
    await other.send(resume=[resume(num_samples=2, positions=[position])])
    stream.send(finished=end(first.slot, len(a)) + end(second.slot, len(b)))
    texts, tokens, ends = await collect(other, 2)
    assert texts == {0: "Once upon", 1: " time"}
    assert tokens == {0: a, 1: b[1:]}
    assert sorted(finished.sample_index for finished in ends) == [0, 1]


async def test_a_fault_of_ours_while_a_request_is_resumed_ends_it(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await mesh.gateway(peer_id="lost")
    await gateway.send(submit=[kept(num_samples=2)])
    stream = await mesh.engines[0].next_stream()
    first, second = await stream.next_adds(2)
    gateway.close()
    attach = SampleOutput.attach

    def fail_at_last(output: SampleOutput, *args: Any) -> None:
        if output.sample_index:
            raise RuntimeError("a bug")
        attach(output, *args)

    monkeypatch.setattr(SampleOutput, "attach", fail_at_last)
    other = await mesh.gateway(peer_id="other")
    assert await refusal(other, num_samples=2) == "INTERNAL"
    aborted: list[int] = []
    while len(aborted) < 2:
        aborted += (await stream.next_input()).abort_slots
    assert sorted(aborted) == [first.slot, second.slot]
    assert await refusal(other, slot=2, num_samples=2) == "REQUEST_LOST"


async def test_log_probabilities_are_kept(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway = await mesh.gateway(peer_id="lost")
    stream, (slot,) = await mesh.started(gateway, kept(logprobs=1, prompt_logprobs=0))
    prompt = SlotLogprobs(slot=slot, prompt=True, token_index=1, logprobs=Logprobs(sampled=[-1, -2], rank=[3, 4]))
    numbers = [-float(token_id) for token_id in ids]
    columns = Logprobs(sampled=numbers, rank=ids, top=1, token_id=ids, logprob=numbers)
    stream.send((slot, 0, ids), logprobs=[prompt, SlotLogprobs(slot=slot, token_index=0, logprobs=columns)])
    before = await gateway.next_frame()
    gateway.close()
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(7)])
    whole = await other.next_frame()
    for each in before.logprobs:
        each.slot = 7
    assert list(whole.logprobs) == list(before.logprobs)
    await other.send(resume=[resume(8, positions=[SamplePosition(num_tokens=1, emitted_text_bytes=1)])])
    frame = await other.next_frame()
    of_output = frame.logprobs[1]
    assert of_output.token_index == 1
    assert list(of_output.logprobs.sampled) == numbers[1:]
    assert list(of_output.token_text) == list(of_output.sampled_text) == list(before.logprobs[1].sampled_text[1:])
    assert [(taken.slot, taken.error.reason) for taken in frame.finished] == [(7, "ABORTED")]


@pytest.mark.parametrize("how", ["runs", "is repeated", "lost its gateway", "has ended"])
async def test_log_probabilities_that_another_output_processor_sent_are_computed_anew(mesh: Mesh, how: str) -> None:
    """The gateway had moved the request here with its tokens. A call that resumed it got 404: their log probabilities
    are not here."""
    ids = mesh.ids("Once upon a time")
    gateway = await mesh.gateway(peer_id="old")
    journal = SampleJournal(token_ids=ids[:2], emitted_text_bytes=9)
    stream, (slot,) = await mesh.started(gateway, kept(logprobs=1, journals=[journal]))
    if how == "lost its gateway":
        gateway.close()
    elif how == "has ended":
        columns = Logprobs(sampled=[-1.0] * 2, rank=[1, 1])
        logprobs = [SlotLogprobs(slot=slot, token_index=2, logprobs=columns)]
        stream.send((slot, 2, ids[2:4]), finished=end(slot, 4), logprobs=logprobs)
        await gateway.until_finished(1)
    other = await mesh.gateway(peer_id="other")
    if how == "is repeated":  # it ran beside the first one
        repeat = kept(7, logprobs=1, take_over=True)
        repeat.request_id = "request-1"
        await other.send(submit=[repeat])
    else:
        await other.send(resume=[resume(7, fingerprint=b"body")])
    (again,) = await stream.next_adds(1)
    assert list(again.accepted_token_ids) == []
    if how in ("runs", "is repeated"):
        assert (await gateway.until_finished(1))[2].error.reason == "ABORTED"
    numbers = [-float(token_id) for token_id in ids]
    columns = Logprobs(sampled=numbers, rank=ids, top=1, token_id=ids, logprob=numbers)
    logprobs = [SlotLogprobs(slot=again.slot, token_index=0, logprobs=columns)]
    stream.send((again.slot, 0, ids), finished=end(again.slot, len(ids)), logprobs=logprobs)
    texts, tokens, ends = await collect(other)
    assert (texts[0], tokens[0], ends[0].slot) == ("Once upon a time", ids, 7)


async def test_text_held_for_a_stop_string_is_held_again(mesh: Mesh) -> None:
    ids = mesh.ids("a time")
    stream, slot = await lost(mesh, kept(stop=["time flies"]), ids)
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume()])
    assert list((await other.next_frame()).text) == ["a "]
    flies = mesh.ids(" flies")
    stream.send((slot, len(ids), flies))
    await stream.next_input()
    stream.send(finished=[Finished(slot=slot, reason=LENGTH, num_output_tokens=len(ids + flies))])
    texts, _, (finished,) = await collect(other)
    assert (texts.get(0, ""), finished.stop_reason) == ("", "time flies")


async def test_larger_pieces_stay_large(mesh: Mesh) -> None:
    ids = mesh.ids(TEXT)
    stream, slot = await lost(mesh, kept(stream_interval=4), ids[:2])
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume()])
    assert list((await other.next_frame()).token_ids) == ids[:2]
    for i in range(2, len(ids)):
        stream.send((slot, i, ids[i : i + 1]))
    stream.send(finished=end(slot, len(ids)))
    assert len((await other.next_frame()).token_ids) == 4
    texts, _, _ = await collect(other)
    assert TEXT.endswith(texts[0])


async def test_a_live_request_is_taken_over(mesh: Mesh) -> None:
    ids = mesh.ids(TEXT)
    old, new = await mesh.gateway(peer_id="old"), await mesh.gateway(peer_id="new")
    stream, (slot,) = await mesh.started(old, kept())
    stream.send((slot, 0, ids[:1]))
    await old.next_frame()
    await new.send(resume=[resume(5)])
    assert (await old.until_finished(1))[2].error.reason == "ABORTED"
    assert list((await new.next_frame()).token_ids) == ids[:1]
    await old.send(cancel_slots=[1])
    old.close()
    stream.send((slot, 1, ids[1:]), finished=end(slot, len(ids)))
    assert (await new.until_finished(5))[2].completion_tokens == len(ids)


async def test_a_request_without_a_token_is_found_at_once(mesh: Mesh) -> None:
    gateway = await mesh.gateway(peer_id="lost")
    stream, (slot,) = await mesh.started(gateway, kept())
    gateway.close()
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(4)])
    assert list((await other.next_frame()).found_slots) == [4]
    stream.send((slot, 0, mesh.ids("a")))
    assert list((await other.next_frame()).slot) == [4]
    third = await mesh.gateway(peer_id="third")
    await third.send(resume=[resume(2)])
    frame = await third.next_frame()
    assert (list(frame.slot), list(frame.found_slots)) == ([2], []), "its tokens say it"


async def test_what_cannot_be_resumed_is_aborted_with_its_stream(mesh: Mesh) -> None:
    stream, slot = await lost(mesh, submit(1, tenant="someone"), mesh.ids("a"))
    assert list((await stream.next_input()).abort_slots) == [slot]
    assert await refusal(await mesh.gateway(peer_id="other")) == "REQUEST_LOST"


async def test_unknown_ids_and_those_of_other_tenants_are_refused_alike(mesh: Mesh) -> None:
    await lost(mesh, kept(), mesh.ids("a"))
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(1, of=9), resume(2, tenant="another"), resume(3, tenant="")])
    ends = list[RequestFinished]()
    while len(ends) < 3:
        ends += (await other.next_frame()).finished
    assert {(each.error.reason, each.error.message) for each in ends} == {(ends[0].error.reason, ends[0].error.message)}
    assert ends[0].error.reason == "REQUEST_LOST"


async def test_another_body_or_number_of_samples_is_refused(mesh: Mesh) -> None:
    await lost(mesh, kept(), mesh.ids("a"))
    other = await mesh.gateway(peer_id="other")
    assert await refusal(other, fingerprint=b"else") == "BODY_CHANGED"
    assert await refusal(other, slot=2, num_samples=2) == "INVALID_ARGUMENT"
    assert await refusal(other, slot=3, positions=[SamplePosition(num_tokens=2)]) == "INVALID_ARGUMENT"
    await other.send(resume=[resume(4)])
    assert list((await other.next_frame()).text) == ["a"]


async def test_requests_that_begin_and_that_resume_share_a_message(mesh: Mesh) -> None:
    stream, _ = await lost(mesh, kept(), mesh.ids("a"))
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(1), resume(3, of=9)], submit=[submit(2)])
    slots, ends = list[int](), list[RequestFinished]()
    while not slots or not ends:
        frame = await other.next_frame()
        slots += frame.slot
        ends += frame.finished
    assert (slots, [each.slot for each in ends]) == ([1], [3])
    assert len((await stream.next_input()).add) == 1


@pytest.mark.parametrize("slots", [(1, 1), (2, 2)])
async def test_a_slot_is_used_once(mesh: Mesh, slots: tuple[int, int]) -> None:
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(slots[0])], submit=[submit(slots[1])])
    with pytest.raises(grpc.aio.AioRpcError, match="slots must increase"):
        await other.next_frame()


async def test_cancelled_requests_cannot_be_resumed(mesh: Mesh) -> None:
    gateway = await mesh.gateway(peer_id="old")
    stream, (slot,) = await mesh.started(gateway, kept())
    await gateway.send(cancel_slots=[1])
    assert list((await stream.next_input()).abort_slots) == [slot]
    assert await refusal(await mesh.gateway(peer_id="other")) == "REQUEST_LOST"


async def test_a_gateway_that_comes_back_submits_again_itself(mesh: Mesh) -> None:
    """Until then another one finds the request: the gateway may be starved, or killed, before it has sent it again."""
    stream, slot = await lost(mesh, kept(), mesh.ids("a"))
    back = await mesh.gateway(peer_id="lost")
    wanted = RecallRequest(request_id="request-1", tenant="someone")
    assert not (await mesh.recall(wanted)).is_attended
    again = kept(1)
    again.request_id = "request-1"
    await back.send(submit=[again])
    aborted, added = list[int](), list[int]()
    while not (aborted and added):
        message = await stream.next_input()
        aborted += message.abort_slots
        added += [each.slot for each in message.add]
    assert (aborted, slot in added) == ([slot], False)
    assert (await mesh.recall(wanted)).is_attended


async def test_a_request_that_moved_while_its_gateway_was_away_is_not_found_where_it_was(mesh: Mesh) -> None:
    """It ran at two output processors, and the answer of the call that resumed it went on as the other one did not."""
    stream, slot = await lost(mesh, kept(), mesh.ids("a"))
    back = await mesh.gateway(peer_id="lost")
    await back.send(moved=[Withdrawal(request_id="request-1", tenant="someone")])
    assert list((await stream.next_input()).abort_slots) == [slot]
    assert await refusal(await mesh.gateway(peer_id="other")) == "REQUEST_LOST"


async def test_a_call_that_resumes_a_request_goes_where_it_has_moved(mesh: Mesh) -> None:
    """The gateway had sent the end of what was left and the call that sought it in one message."""
    await lost(mesh, kept(), mesh.ids("a"))
    back = await mesh.gateway(peer_id="lost")
    await back.send(moved=[Withdrawal(request_id="request-1", tenant="someone")], resume=[resume()])
    assert [each.error.reason for each in (await back.next_frame()).finished] == ["REQUEST_LOST"]


async def test_a_gateway_that_comes_back_finds_what_it_had_resumed(mesh: Mesh) -> None:
    """Its stream broke before anything of the request arrived: the output processor had cancelled it as one that is
    submitted again, and the client got 404."""
    ids = mesh.ids(TEXT)
    stream, slot = await lost(mesh, kept(), ids[:3])
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume()])
    await other.next_frame()
    other.close()
    back = await mesh.gateway(peer_id="other")
    await back.send(resume=[resume()])
    assert list((await back.next_frame()).token_ids) == ids[:3]
    stream.send((slot, 3, ids[3:]), finished=end(slot, len(ids)))
    assert (await back.until_finished(1))[2].completion_tokens == len(ids)


async def test_take_over_attaches_or_starts(mesh: Mesh) -> None:
    ids = mesh.ids(TEXT)
    first = await mesh.gateway(peer_id="first")
    stream, (slot,) = await mesh.started(first, kept(take_over=True))
    stream.send((slot, 0, ids[:2]))
    await first.next_frame()
    first.close()
    again = kept(take_over=True)
    other = await mesh.gateway(peer_id="other")
    changed = kept(3, take_over=True)
    changed.request_id, changed.fingerprint = again.request_id, b"else"
    await other.send(submit=[again, changed])
    frame = await other.next_frame()
    assert list(frame.token_ids) == ids[:2]
    assert [(each.slot, each.error.reason) for each in frame.finished] == [(3, "BODY_CHANGED")]
    stream.send((slot, 2, ids[2:]), finished=end(slot, len(ids)))
    assert (await other.until_finished(1))[2].completion_tokens == len(ids)
    third = await mesh.gateway(peer_id="third")
    await third.send(submit=[again])
    assert (await third.until_finished(1))[0] == TEXT


async def test_an_answer_is_kept_longer_for_calls_that_resume_it(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those that repeat its key, which would have the same answer for ever."""
    ids, prolonged = mesh.ids(TEXT), list[tuple[str, str]]()
    monkeypatch.setattr(KeptRequests, "prolong", lambda _, request: prolonged.append(request.key))
    stream, slot = await lost(mesh, kept(), ids[:3])
    other = await mesh.gateway(peer_id="other")
    await other.send(submit=[kept(1, take_over=True)])
    stream.send((slot, 3, ids[3:]), finished=end(slot, len(ids)))
    await collect(other)
    assert prolonged == []
    await other.send(resume=[resume(2)])
    await collect(other)
    assert prolonged == [("someone", kept().request_id)]


async def test_what_one_gateway_has_lost_outlives_what_another_one_sends(mesh: Mesh) -> None:
    ids = mesh.ids(TEXT)
    stream, _ = await lost(mesh, kept(), ids[:3])
    other = await mesh.gateway(peer_id="other")
    await other.send(submit=[kept(1)])
    await stream.next_adds(1)
    await other.send(cancel_slots=[1])
    await other.until_finished(1)
    await other.send(resume=[resume(2)])
    assert list((await other.next_frame()).token_ids) == ids[:3]


async def test_an_error_is_not_repeated(mesh: Mesh) -> None:
    first = await mesh.gateway(peer_id="first")
    stream, (slot,) = await mesh.started(first, kept(take_over=True))
    refusal = wire_errors.to_proto(errors.InvalidArgument("not this one"))
    stream.send(finished=[Finished(slot=slot, reason=ERROR, error=refusal)])
    assert (await first.until_finished(1))[2].reason == ERROR
    other = await mesh.gateway(peer_id="other")
    await other.send(submit=[kept(take_over=True)])
    assert len(await stream.next_adds(1)) == 1


async def test_a_request_of_a_lost_gateway_that_its_client_has_cancelled(mesh: Mesh) -> None:
    stream, slot = await lost(mesh, kept(), mesh.ids(TEXT)[:3])
    other = await mesh.gateway(peer_id="other")
    await other.send(withdraw=[Withdrawal(request_id="request-1", tenant="someone")])
    assert list((await stream.next_input()).abort_slots) == [slot]
    assert await refusal(other) == "REQUEST_LOST"


async def test_a_request_is_recalled_with_what_it_was_begun_with(mesh: Mesh) -> None:
    request = kept(recipe=b"of the gateway")
    request.prompt.embeds.add(rows=b"large")
    stream, slot = await lost(mesh, request, mesh.ids(TEXT)[:3])
    wanted = RecallRequest(request_id="request-1", tenant="someone", wants_prompt=True)
    recalled = await mesh.recall(wanted)
    tokens = Prompt(token_ids=request.prompt.token_ids)
    assert (recalled.recipe, recalled.fingerprint, recalled.prompt) == (b"of the gateway", b"body", tokens)
    assert (recalled.is_attended, recalled.num_counted) == (False, 0), "its gateway was lost"
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume()])
    await other.next_frame()
    wanted.wants_prompt = False
    recalled = await mesh.recall(wanted)
    assert (recalled.is_attended, recalled.num_counted, recalled.HasField("prompt")) == (True, 3, False)
    stream.send(finished=end(slot, 3))
    await other.next_frame()
    recalled = await mesh.recall(wanted)
    assert (recalled.is_attended, recalled.num_counted) == (False, 3)
    for others in ({"tenant": "another one"}, {"request_id": "request-2"}):
        fields = {"request_id": "request-1", "tenant": "someone", **others}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.recall(RecallRequest(**fields))
        assert wire_errors.from_rpc(caught.value).reason == "REQUEST_LOST"
