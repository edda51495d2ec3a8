"""Tests copies of requests that other output processors run: both gateway and output processor are lost."""

import asyncio
from itertools import count
from typing import Any

import grpc.aio
import pytest

from tests.services.output_processor.fakes import LENGTH, SOON, Gateway
from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.test_resumed_requests import TEXT, collect, end, kept, resume
from tokenloom.v1.output_processor_pb2 import (
    CopiedOutput,
    JournalCopies,
    RecallRequest,
    RequestFinished,
    SampleJournal,
    Submit,
    Withdrawal,
)
from tokenloom.v1.types_pb2 import FinishReason

_slots = count(1_000_000)
"""Of requests that nobody has, above all others."""


async def copied(mesh: Mesh, request: Submit, *outputs: CopiedOutput, peer_id: str = "lost", **more: Any) -> Gateway:
    """Return the gateway that has sent a copy, which the output processor has taken."""
    gateway = await mesh.gateway(peer_id=peer_id)
    await gateway.send(journal_copies=JournalCopies(begun=[request], outputs=outputs, **more))
    await taken(gateway)
    return gateway


async def taken(gateway: Gateway) -> None:
    """Wait until the output processor has taken everything that was sent before."""
    slot = next(_slots)
    await gateway.send(resume=[resume(slot, of=99)])
    while slot not in [each.slot for each in (await gateway.next_frame()).finished]:
        pass


async def refusals(gateway: Gateway, *wanted: Any) -> list[str]:
    """Return the reasons for which some Resumes are refused."""
    await gateway.send(resume=wanted)
    ends: list[RequestFinished] = []
    while len(ends) < len(wanted):
        ends += (await gateway.next_frame()).finished
    return [each.error.reason for each in ends]


def news(copy: int, *journals: SampleJournal) -> CopiedOutput:
    return CopiedOutput(copy=copy, journals=journals)


async def test_a_request_continues_from_its_copy(mesh: Mesh) -> None:
    ids = mesh.ids(TEXT)
    begun = kept(7, journals=[SampleJournal(token_ids=ids[:2], emitted_text_bytes=6)])
    begun.request_id = "request-1"
    gateway = await copied(
        mesh, begun, news(7, SampleJournal(token_ids=ids[2:4])), news(8, SampleJournal(token_ids=ids))
    )
    other = await mesh.gateway(peer_id="other")
    assert await refusals(other, resume(1, from_copy=True)) == ["REQUEST_LOST"], "its gateway lives"
    await lose(gateway)
    assert await refusals(other, resume(2)) == ["REQUEST_LOST"], "the search for what runs it comes first"
    await other.send(resume=[resume(3, from_copy=True, fingerprint=b"body")])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    assert list(add.accepted_token_ids) == ids[:4]
    stream.send((add.slot, 4, ids[4:]), finished=end(add.slot, len(ids)))
    texts, tokens, (finished,) = await collect(other)
    assert (texts[0], tokens[0]) == (TEXT, ids), "all of it, from its beginning"
    assert (finished.slot, finished.reason, finished.completion_tokens) == (3, LENGTH, len(ids))
    again = await mesh.gateway(peer_id="third")
    await again.send(resume=[resume(4)])
    assert (await collect(again))[1][0] == ids, "it is kept as any other one that has ended"


async def lose(gateway: Gateway) -> None:
    """End a gateway's stream, and wait until the output processor has noticed it."""
    await gateway.call.done_writing()
    async with asyncio.timeout(SOON):
        while await gateway.call.read() is not grpc.aio.EOF:
            pass


async def test_samples_that_had_ended_are_sent_again(mesh: Mesh) -> None:
    a, b = mesh.ids("Once upon"), mesh.ids("a time")
    ends = [
        RequestFinished(slot=1, sample_index=index, reason=LENGTH, completion_tokens=len(ids), prompt_tokens=3)
        for index, ids in enumerate((a, b))
    ]
    outputs = [
        news(1, SampleJournal(sample_index=1, token_ids=b[:1])),
        news(1, SampleJournal(token_ids=a, finished=True, end=ends[0])),
        news(1, SampleJournal(sample_index=1, token_ids=b[1:], finished=True, end=ends[1])),
    ]
    await lose(await copied(mesh, kept(1, num_samples=2), *outputs))
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(7, num_samples=2, from_copy=True)])
    texts, tokens, finished = await collect(other, 2)
    assert (texts, tokens) == ({0: "Once upon", 1: "a time"}, {0: a, 1: b})
    assert [(each.slot, each.sample_index, each.completion_tokens) for each in finished] == [
        (7, 0, len(a)),
        (7, 1, len(b)),
    ]
    await other.send(resume=[resume(8, num_samples=2)])
    assert (await collect(other, 2))[0] == texts, "nothing runs, and it is kept"


async def test_a_copy_is_of_one_tenant_and_one_body(mesh: Mesh) -> None:
    await lose(await copied(mesh, kept(1)))
    other = await mesh.gateway(peer_id="other")
    wanted = [
        resume(1, from_copy=True, tenant="another"),
        resume(2, from_copy=True, fingerprint=b"else"),
        resume(3, from_copy=True, num_samples=2),
        resume(4, from_copy=True, of=2),
    ]
    assert await refusals(other, *wanted) == ["REQUEST_LOST", "BODY_CHANGED", "INVALID_ARGUMENT", "REQUEST_LOST"]
    await other.send(resume=[resume(5, from_copy=True)])
    assert await (await mesh.engines[0].next_stream()).next_adds(1), "the others have left it"


@pytest.mark.parametrize("how", ["ended", "withdrawn", "of its client", "replaced"])
async def test_a_copy_that_is_out_of_date_is_forgotten(mesh: Mesh, how: str) -> None:
    gateway = await copied(mesh, kept(1))
    other = await mesh.gateway(peer_id="other")
    gone = Withdrawal(request_id="request-1", tenant="someone")
    if how == "ended":
        await gateway.send(journal_copies=JournalCopies(ended=[1]))
    elif how == "withdrawn":
        await other.send(journal_copies=JournalCopies(withdrawn=[gone]))
    elif how == "of its client":
        await other.send(withdraw=[gone])
    elif how == "replaced":
        await other.send(journal_copies=JournalCopies(begun=[kept(1)]))
    await taken(gateway)
    await taken(other)
    await lose(gateway)
    third = await mesh.gateway(peer_id="third")
    assert await refusals(third, resume(1, from_copy=True)) == ["REQUEST_LOST"]


async def test_a_copy_says_that_the_gateway_of_its_request_lives(mesh: Mesh) -> None:
    """What runs the request may be lost, and the gateway starved: the search for it goes on until it is there again."""
    gateway, other = await copied(mesh, kept(1)), await mesh.gateway(peer_id="other")
    said: list[bool] = []
    for slot, of in ((1, 1), (2, 9)):
        await other.send(resume=[resume(slot, of=of, from_copy=True)])
        said += [each.is_copied for each in (await other.next_frame()).finished]
    assert said == [True, False]
    wanted = RecallRequest(request_id="request-1", tenant="someone", from_copy=True)
    assert (await mesh.recall(wanted)).is_attended
    await lose(gateway)
    await other.send(resume=[resume(3)])
    assert not (await other.next_frame()).finished[0].is_copied, "what continues it is a copy"
    await mesh.gateway(peer_id="lost")
    assert not (await mesh.recall(wanted)).is_attended, "it has come back, and has not sent it again"
    await other.send(resume=[resume(4, from_copy=True)])
    assert await (await mesh.engines[0].next_stream()).next_adds(1)


async def test_a_copy_says_what_its_request_was_begun_with(mesh: Mesh) -> None:
    await lose(await copied(mesh, kept(1, recipe=b"chat")))
    wanted = RecallRequest(request_id="request-1", tenant="someone", wants_prompt=True)
    with pytest.raises(grpc.aio.AioRpcError, match="not known"):
        await mesh.recall(wanted)
    wanted.from_copy = True
    found = await mesh.recall(wanted)
    assert (found.recipe, found.fingerprint, len(found.prompt.token_ids) > 0) == (b"chat", b"body", True)
    assert not found.is_attended
    wanted.tenant = "another"
    with pytest.raises(grpc.aio.AioRpcError, match="not known"):
        await mesh.recall(wanted)


async def test_a_copy_with_a_sample_that_its_request_lacks_is_refused(mesh: Mesh) -> None:
    await lose(await copied(mesh, kept(1), news(1, SampleJournal(sample_index=3, token_ids=[5]))))
    other = await mesh.gateway(peer_id="other")
    assert await refusals(other, resume(1, from_copy=True)) == ["INVALID_ARGUMENT"]
    assert await refusals(other, resume(2, from_copy=True)) == ["REQUEST_LOST"]


async def test_a_copy_that_was_cancelled_runs_no_more(mesh: Mesh) -> None:
    over = RequestFinished(reason=FinishReason.FINISH_REASON_ABORT)
    await lose(await copied(mesh, kept(1), news(1, SampleJournal(finished=True, end=over))))
    other = await mesh.gateway(peer_id="other")
    await other.send(resume=[resume(1, from_copy=True)])
    assert [each.reason for each in (await collect(other))[2]] == [over.reason]
    assert await refusals(other, resume(2, from_copy=True)) == ["REQUEST_LOST"]
