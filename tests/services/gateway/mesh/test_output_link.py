"""The stream to an output processor: what is sent, what is dealt out, and what happens when it lies, hangs or ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import LIMITS, MODEL, SOON, FakeMesh, FakeRequest
from tokenloom.request import errors
from tokenloom.services.gateway.mesh.collector import Collector
from tokenloom.services.gateway.mesh.output_pool import RETRY_SECONDS
from tokenloom.services.gateway.mesh.pending_request import MAX_WRONG
from tokenloom.services.gateway.mesh.process_stream import ROWS_PER_TURN, ProcessStream
from tokenloom.services.runtime.peers.hello import HEARTBEAT_SECONDS, SILENCE_SECONDS
from tokenloom.services.runtime.streams.slotted_stream import INITIAL_CREDIT
from tokenloom.v1.output_processor_pb2 import ProcessFrame

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 100}


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={**BODY, **fields})


async def submit(mesh: FakeMesh, http: httpx.AsyncClient) -> tuple["asyncio.Task[httpx.Response]", FakeRequest]:
    task = asyncio.create_task(post(http))
    return task, await mesh.outputs.next_request()


async def test_slots_grow_and_ids_are_ours(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    seen = []
    for _ in range(3):
        task = asyncio.create_task(http.post("/v1/completions", json=BODY, headers={"x-request-id": "same"}))
        request = await mesh.outputs.next_request()
        seen.append(request.submit)
        request.answer("x")
        assert (await task).headers["x-request-id"] == "same"
    assert [each.slot for each in seen] == [1, 2, 3]
    assert len({each.request_id for each in seen}) == 3
    assert all("same" not in each.request_id for each in seen)


async def test_credit_is_granted_as_frames_are_dealt(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, request = await submit(mesh, http)
    for number in range(INITIAL_CREDIT):
        request.send("x", [number])
    request.finish()
    assert (await task).json()["choices"][0]["text"] == "x" * INITIAL_CREDIT
    await post_and_answer(mesh, http)  # the grant has arrived by now
    assert mesh.outputs.sessions[-1].credit >= 2 * INITIAL_CREDIT


async def post_and_answer(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, request = await submit(mesh, http)
    request.answer("fine")
    assert (await task).json()["choices"][0]["text"] == "fine"


async def test_an_error_of_a_request_is_its_own(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, request = await submit(mesh, http)
    request.fail(errors.ResourceExhausted("full", retry_after=3))
    response = await task
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"] == {
        "message": "full",
        "type": "server_error",
        "param": None,
        "code": "resource_exhausted",
    }
    await post_and_answer(mesh, http)
    assert len(mesh.outputs.sessions) == 1


@pytest.mark.parametrize(
    "frame",
    [
        ProcessFrame(slot=[1], text=[], token_index=[0], token_ids=[5]),
        ProcessFrame(slot=[1], text=["a"], token_index=[0], token_ids=[LIMITS.vocab_size]),
        ProcessFrame(slot=[1], text=["a"], token_index=[], token_ids=[5]),
        ProcessFrame(slot=[1], text=["a"], token_index=[0], num_tokens=[2], token_ids=[5]),
        ProcessFrame(slot=[1], text=["a"], token_index=[0], token_ids=[5, 6]),
        ProcessFrame(slot=[1, 1], text=["a", "b"], token_index=[0, 1], num_tokens=[1], token_ids=[5]),
    ],
    ids=["no text", "no such token", "no index", "too few ids", "too many ids", "too few counts"],
)
async def test_columns_that_do_not_fit_end_the_stream(
    mesh: FakeMesh, http: httpx.AsyncClient, frame: ProcessFrame
) -> None:
    task, _ = await submit(mesh, http)
    mesh.outputs.sessions[-1].frames.put_nowait(frame)
    await answer_again(mesh, task)
    assert len(mesh.outputs.sessions) == 2


async def answer_again(mesh: FakeMesh, *tasks: "asyncio.Task[httpx.Response]") -> None:
    """Answer requests that were sent again on a new stream."""
    for _ in tasks:
        (await mesh.outputs.next_request()).answer("again")
    for task in tasks:
        assert (await task).json()["choices"][0]["text"] == "again"


async def test_a_doubled_token_is_no_answer(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, request = await submit(mesh, http)
    frame = ProcessFrame(slot=[request.submit.slot], text=["a"], token_index=[0], token_ids=[5])
    for _ in range(2):
        mesh.outputs.sessions[-1].frames.put_nowait(frame)
    await asyncio.wait_for(request.cancelled.wait(), SOON)
    pass_time(RETRY_SECONDS)
    again = await mesh.outputs.next_request()
    assert list(again.submit.journals[0].token_ids) == [5]
    again.answer("b")
    assert (await task).json()["choices"][0]["text"] == "ab"


async def silence(mesh: FakeMesh, seconds: float) -> None:
    """Let time pass in which the output processor sends nothing."""
    mesh.outputs.sessions[-1].beating = False
    for _ in range(round(seconds / HEARTBEAT_SECONDS)):
        pass_time(HEARTBEAT_SECONDS)
        await settle()


async def test_an_output_processor_that_is_busy_is_not_dead(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, request = await submit(mesh, http)
    await silence(mesh, 7.5)
    request.answer("late")
    assert (await task).json()["choices"][0]["text"] == "late"
    assert len(mesh.outputs.sessions) == 1


async def test_silence_is_death(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, _ = await submit(mesh, http)
    await silence(mesh, SILENCE_SECONDS + 1)
    await answer_again(mesh, task)
    assert len(mesh.outputs.sessions) == 2


async def test_the_requests_of_a_stream_that_ends_begin_again_on_the_next(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    tasks = [await submit(mesh, http) for _ in range(3)]
    mesh.outputs.sessions[-1].end()
    await answer_again(mesh, *(task for task, _ in tasks))
    assert len(mesh.outputs.sessions) == 2


async def test_frames_of_a_cancelled_slot_are_dropped(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, request = await submit(mesh, http)
    task.cancel()
    await asyncio.wait_for(request.cancelled.wait(), SOON)
    request.answer("late")
    await post_and_answer(mesh, http)


async def test_answers_that_begin_are_read_before_others_get_their_tokens() -> None:
    owner: Any = SimpleNamespace(vocab_size=9)
    stream, older, newer = ProcessStream(owner), Collector(1), Collector(1)
    for slot, collector in ((1, older), (2, newer)):
        target: Any = SimpleNamespace(first_index=0, collector=collector, num_samples=1, max_tokens=9)
        stream.slots[slot] = target
    first = ProcessFrame(slot=[1], text=["a"], token_index=[0], token_ids=[5])
    assert len(list(stream.receive(first))) == 1, "what follows may be in the next frame, which is here already"
    reader = asyncio.create_task(newer.take())
    await asyncio.sleep(0)
    frame = ProcessFrame(slot=[2, 1], text=["x", "b"], token_index=[0, 1], token_ids=[7, 6])
    for _ in stream.receive(frame):
        await asyncio.sleep(0)
        assert [delta.text for delta in reader.result()] == ["x"]
        assert older.num_tokens(0) == 1
    assert older.num_tokens(0) == 2


async def test_what_arrives_does_not_wait_for_all_rows_of_a_frame() -> None:
    owner: Any = SimpleNamespace(vocab_size=9)
    stream, collectors = ProcessStream(owner), [Collector(1) for _ in range(2 * ROWS_PER_TURN + 1)]
    for slot, collector in enumerate(collectors):
        target: Any = SimpleNamespace(first_index=0, collector=collector, num_samples=1, max_tokens=9)
        stream.slots[slot] = target
    for token_index in range(2):
        slots = range(len(collectors))
        frame = ProcessFrame(slot=slots, text=["a"] * len(slots), token_index=[token_index] * len(slots))
        frame.token_ids.extend([5] * len(slots))
        numbers = [sum(each.num_tokens(0) > token_index for each in collectors) for _ in stream.receive(frame)]
        assert numbers[:2] == [ROWS_PER_TURN, 2 * ROWS_PER_TURN]
        assert all(each.num_tokens(0) == token_index + 1 for each in collectors)


async def test_a_frame_that_cannot_be_ends_its_stream_only(
    mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("int too big to convert")

    task, request = await submit(mesh, http)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessStream, "_grant", fail)
        request.send("x", [1])
        again = await mesh.outputs.next_request()  # the request goes on in another stream
    again.answer("fine")
    assert (await task).json()["choices"][0]["text"] == "xfine"
    await post_and_answer(mesh, http)


async def test_tokens_beyond_the_budget_are_not_delivered(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, max_tokens=2))
    request = await mesh.outputs.next_request()
    request.send("xxx", [1, 2, 3])
    await asyncio.wait_for(request.cancelled.wait(), SOON)
    pass_time(RETRY_SECONDS)
    again = await mesh.outputs.next_request()
    again.answer("ok")
    assert (await task).json()["choices"][0]["text"] == "ok"


async def test_a_sample_of_another_request_is_not_reached(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, prompt=["a", "b"]))
    requests = [await mesh.outputs.next_request() for _ in range(2)]
    requests[0]._num_tokens.append(0)
    requests[0].send("x", [1], sample_index=1)  # the other prompt's, as a gateway counts them
    await asyncio.wait_for(requests[0].cancelled.wait(), SOON)
    pass_time(RETRY_SECONDS)
    again = await mesh.outputs.next_request()
    again.answer("a")
    requests[1].answer("b")
    assert [choice["text"] for choice in (await task).json()["choices"]] == ["a", "b"]


async def test_a_request_that_output_processors_bring_no_further_ends_typed(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    task, _ = await submit(mesh, http)
    for number in range(MAX_WRONG):
        mesh.outputs.sessions[-1].frames.put_nowait(ProcessFrame(slot=[1], text=["a", "b"]))
        if number < MAX_WRONG - 1:
            await mesh.outputs.next_request()
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    health = (await http.get("/health")).json()
    assert {"kind": "wrong_peer"} in [{"kind": each["kind"]} for each in health["fall_backs"]]
