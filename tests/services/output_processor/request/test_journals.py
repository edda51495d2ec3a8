"""Requests of an output processor that was lost continue here: each sample from its journal."""

import pytest

from tests.services.output_processor.fakes import LENGTH, STOP, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.request.test_requests import seeds
from tokenloom.request.sampling_params import sample_seed
from tokenloom.v1.engine_pb2 import Finished, SlotLogprobs
from tokenloom.v1.output_processor_pb2 import RequestFinished, SampleJournal
from tokenloom.v1.types_pb2 import EngineRole, Logprobs

PREFILL, DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


async def ends_of(gateway: Gateway, count: int) -> tuple[dict[int, str], dict[int, list[int]], list[RequestFinished]]:
    """Text and tokens of each sample of slot 1, and the ends."""
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    ends: list[RequestFinished] = []
    while len(ends) < count:
        frame = await gateway.next_frame()
        tokens = iter(frame.token_ids)
        counts = list(frame.num_tokens) or [1] * len(frame.slot)
        samples = list(frame.sample_index) or [0] * len(frame.slot)
        for sample, text, number in zip(samples, frame.text, counts, strict=True):
            texts[sample] = texts.get(sample, "") + text
            ids.setdefault(sample, []).extend(next(tokens) for _ in range(number))
        ends += frame.finished
    return texts, ids, ends


async def test_samples_continue_from_their_journals_and_ended_ones_do_not_run(mesh: Mesh) -> None:
    once = mesh.ids("Once upon a time")
    journals = [
        SampleJournal(sample_index=0, token_ids=once[:3], emitted_text_bytes=9, finished=True),
        SampleJournal(sample_index=1, token_ids=once[:2], emitted_text_bytes=4),
    ]
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=4, seed=9, journals=journals, prompt_logprobs=0)])
    stream = await mesh.engines[0].next_stream()
    adds = await stream.next_adds(3)
    assert [list(add.accepted_token_ids) for add in adds] == [once[:2], [], []]
    assert seeds(adds) == [sample_seed(9, index) for index in (1, 2, 3)]
    assert not any(add.sampling_params.HasField("prompt_logprobs") for add in adds), "they belong to sample 0"
    (pick,) = mesh.coordinator.requests
    assert pick.prompt_tokens == 3 + 2
    stream.send((adds[0].slot, 2, once[2:]), (adds[1].slot, 0, [8]), (adds[2].slot, 0, [9]))
    stream.send(
        finished=[
            Finished(slot=add.slot, reason=LENGTH, num_output_tokens=number)
            for add, number in zip(adds, (len(once), 1, 1), strict=True)
        ]
    )
    ids, ends = await outputs_after(gateway, {1: once[:2]})
    assert ids == {1: once, 2: [8], 3: [9]}
    assert sorted(ends) == [1, 2, 3]


async def outputs_after(gateway: Gateway, given: dict[int, list[int]]) -> tuple[dict[int, list[int]], list[int]]:
    _, ids, ends = await ends_of(gateway, 3)
    return {sample: given.get(sample, []) + new for sample, new in ids.items()}, [end.sample_index for end in ends]


async def test_a_stop_string_that_the_journal_completes_ends_its_sample_only(mesh: Mesh) -> None:
    once = mesh.ids("Once upon a time")
    remain = next(n for n in range(len(once) + 1) if "upon" in mesh.tokenizer.decode(once[:n]))
    journals = [SampleJournal(token_ids=once[:remain], emitted_text_bytes=3)]
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=2, stop=["upon"], journals=journals)])
    (add,) = await (stream := await mesh.engines[0].next_stream()).next_adds(1)
    assert list(add.accepted_token_ids) == []
    stream.send((add.slot, 0, [5]), finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=1)])
    texts, _, ends = await ends_of(gateway, 2)
    assert texts[0] == "e "
    first = next(end for end in ends if end.sample_index == 0)
    assert (first.reason, first.stop_reason, first.completion_tokens) == (STOP, "upon", remain)


async def test_a_request_whose_journals_are_complete_needs_no_engine(mesh: Mesh) -> None:
    once = mesh.ids("Once upon")
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, stop=["upon"], journals=[SampleJournal(token_ids=once)])])
    text, _, finished = await gateway.until_finished(1)
    assert (text, finished.reason) == ("Once ", STOP)


@pytest.mark.parametrize("roles", [[PREFILL, DECODE]])
async def test_journals_survive_the_hand_over(mesh: Mesh) -> None:
    once = mesh.ids("Once upon a time")
    gateway = await mesh.gateway()
    journals = [SampleJournal(sample_index=1, token_ids=once[:3])]
    await gateway.send(submit=[submit(1, num_samples=2, journals=journals)])
    prefill = await mesh.engines[0].next_stream()
    (add,) = await prefill.next_adds(1)
    kv = prefill.prefilled(add.slot, 0, once[:1])
    decode = await mesh.engines[1].next_stream()
    (first,) = await decode.next_adds(1)
    assert (list(first.accepted_token_ids), first.kv_source) == (once[:1], kv)
    decode.send((first.slot, 1, once[1:2]))
    (other,) = await decode.next_adds(1)
    assert (list(other.accepted_token_ids), other.HasField("kv_source")) == (once[:3], False)
    decode.send(
        (other.slot, 3, once[3:]),
        finished=[
            Finished(slot=first.slot, reason=LENGTH, num_output_tokens=2),
            Finished(slot=other.slot, reason=LENGTH, num_output_tokens=len(once)),
        ],
    )
    _, ids, ends = await ends_of(gateway, 2)
    assert ids == {0: once[:2], 1: once[3:]}
    assert len(ends) == 2


async def test_log_probabilities_of_the_prompt_are_given_once(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, [5, 6, 7, 8], prompt_logprobs=0, num_prompt_logprobs=2)])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    columns = Logprobs(sampled=[-1, -2, -3], rank=[1, 2, 3])
    stream.send(
        (add.slot, 0, [7]),
        logprobs=[SlotLogprobs(slot=add.slot, prompt=True, token_index=1, logprobs=columns)],
        finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=1)],
    )
    (given,) = (await gateway.next_frame()).logprobs
    assert (given.token_index, list(given.logprobs.sampled), given.first_text) == (3, [-3], b"")


async def test_pieces_keep_their_interval(mesh: Mesh) -> None:
    once = mesh.ids("Once upon a time there")
    gateway = await mesh.gateway()
    journals = [SampleJournal(token_ids=once[:1], emitted_text_bytes=len(mesh.tokenizer.decode(once[:1])))]
    await gateway.send(submit=[submit(1, stream_interval=3, journals=journals)])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    for index in range(1, 6):
        stream.send((add.slot, index, once[index : index + 1]))
    assert list((await gateway.next_frame()).token_ids) == once[1:4]
    stream.send(finished=[Finished(slot=add.slot, reason=LENGTH, num_output_tokens=len(once))])
    assert list((await gateway.next_frame()).token_ids) == once[4:]


@pytest.mark.parametrize(
    "journals",
    [
        [SampleJournal(sample_index=2)],
        [SampleJournal(sample_index=1), SampleJournal(sample_index=1)],
        [SampleJournal(sample_index=0, finished=True), SampleJournal(sample_index=1, finished=True)],
    ],
    ids=["no such sample", "twice", "nothing left"],
)
async def test_journals_that_cannot_be_are_refused(mesh: Mesh, journals: list[SampleJournal]) -> None:
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=2, journals=journals)])
    (finished,) = (await gateway.next_frame()).finished
    assert (finished.error.reason, finished.error.field) == ("INVALID_ARGUMENT", "journals")
