"""Requests move between two output processors: what is sent again, when they wait, and when they end."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh, FakeOutputProcessor, FakeRequest
from tokenloom.request.errors import RequestLost, TryElsewhere
from tokenloom.services.gateway.mesh.pending_request import MAX_LOSSES_ALONE
from tokenloom.services.gateway.mesh.process_stream import ProcessStream
from tokenloom.services.runtime.local_streams.channel import SILENT
from tokenloom.services.runtime.peers import retry_budget
from tokenloom.v1.output_processor_pb2 import ProcessFrame, SampleJournal, SlotTextLogprobs
from tokenloom.v1.types_pb2 import Logprobs

BODY = {"model": MODEL, "prompt": "ab", "max_tokens": 100}
LOST = RequestLost("The request is not known.")
MOVE = TryElsewhere("the output processor is shutting down")


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
async def mesh(socket_dir: Path, settings: dict[str, Any]) -> AsyncIterator[FakeMesh]:
    fake = FakeMesh(socket_dir)
    both = (fake.address("mesh"), fake.address("second"))
    async with fake.gateway(**{"output_processors": both, **settings}) as mesh:
        async with asyncio.timeout(SOON), mesh.http() as http:
            while await Client(mesh, http).num_serving() < len(both):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield mesh


class Client:
    """Posts requests, which go to the output processors in turn."""

    def __init__(self, mesh: FakeMesh, http: httpx.AsyncClient) -> None:
        self.mesh = mesh
        self._http = http

    async def num_serving(self) -> int:
        """Return how many output processors the gateway sends new requests to."""
        parts: dict[str, Any] = (await self._http.get("/health")).json()["parts"]
        return int(parts["output_processor"]["serving"])

    async def begin(self, **fields: Any) -> tuple["asyncio.Task[httpx.Response]", FakeRequest, FakeOutputProcessor]:
        """Post one; returns the answer, the request at its output processor, and the other output processor."""
        task = asyncio.create_task(self._http.post("/v1/completions", json={**BODY, **fields}))
        parts = self.mesh.outputs, self.mesh.second_outputs
        gets = [asyncio.create_task(part.next_request()) for part in parts]
        done, pending = await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
        for get in pending:
            get.cancel()
        (first,) = done
        return task, first.result(), parts[1 - gets.index(first)]


@pytest.fixture
def client(mesh: FakeMesh, http: httpx.AsyncClient) -> Client:
    return Client(mesh, http)


def owner(mesh: FakeMesh, other: FakeOutputProcessor) -> FakeOutputProcessor:
    return mesh.second_outputs if other is mesh.outputs else mesh.outputs


DEALT: dict[int, asyncio.Event] = {}
"""By the slot of a frame that only marks a place among the others: set when the gateway has dealt what came before."""


@pytest.fixture(autouse=True)
def observed_deals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    deal = ProcessStream.receive

    def deal_and_report(stream: ProcessStream, frame: ProcessFrame) -> Iterator[None]:
        yield from deal(stream, frame)
        for slot in frame.engine_death_slots:
            if slot in DEALT:
                DEALT[slot].set()

    monkeypatch.setattr(ProcessStream, "receive", deal_and_report)
    yield
    DEALT.clear()


async def dealt(request: FakeRequest) -> None:
    """Wait until the gateway has dealt all that was sent of a request: frames are read in order."""
    slot = 1_000_000 + len(DEALT)  # no request has it, so that the frame has no effect
    DEALT[slot] = asyncio.Event()
    request._session.frames.put_nowait(ProcessFrame(engine_death_slots=[slot]))
    await asyncio.wait_for(DEALT[slot].wait(), SOON)


async def both_leave(client: Client) -> None:
    """Let both output processors announce that they leave, and wait until the gateway knows."""
    for part in (client.mesh.outputs, client.mesh.second_outputs):
        part.sessions[-1].frames.put_nowait(ProcessFrame(leaving=True))
    while await client.num_serving():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_a_lost_request_continues_elsewhere_with_what_the_client_has_of_each_sample(client: Client) -> None:
    task, request, other = await client.begin(n=3, logprobs=0)
    request.send("é", [1, 2], 0)
    request.send("xy", [3], 1)
    request.finish(sample_index=1)
    await dealt(request)
    owner(client.mesh, other).sessions[-1].end()
    again = await other.next_request()
    runs, has_ended = again.submit.journals
    assert runs == SampleJournal(sample_index=0, token_ids=[1, 2], emitted_text_bytes=2)
    assert not has_ended.HasField("end"), "no call can resume it"
    assert has_ended == SampleJournal(sample_index=1, token_ids=[3], emitted_text_bytes=2, finished=True)
    assert again.submit.request_id == request.submit.request_id
    assert again.submit.sampling_params == request.submit.sampling_params
    again.send("ü", [4], 0)
    again.send("z", [5], 2)
    again.finish(sample_index=0)
    again.finish(sample_index=2)
    response = (await task).json()
    assert [choice["text"] for choice in response["choices"]] == ["éü", "xy", "z"]
    assert response["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("runs", [False, True])
async def test_after_a_loss_a_request_with_a_key_is_sought_at_all_of_them(
    client: Client, http: httpx.AsyncClient, runs: bool
) -> None:
    client.mesh.second_outputs.sessions[-1].end()
    while len(client.mesh.second_outputs.sessions) < 2 or await client.num_serving() < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task = asyncio.create_task(http.post("/v1/completions", json=BODY, headers={"Idempotency-Key": "k"}))
    parts = client.mesh.outputs, client.mesh.second_outputs
    sought = [asyncio.create_task(part.next_resume()) for part in parts]
    (first,), _ = await asyncio.wait(sought, return_when=asyncio.FIRST_COMPLETED)
    first.result()[0].fail(LOST)
    await asyncio.wait(sought)
    (second,) = set(sought) - {first}
    request, resume = second.result()
    if not runs:
        request.fail(LOST)
        gets = [asyncio.create_task(part.next_request()) for part in parts]
        (get,), (other,) = await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
        other.cancel()
        request = get.result()
        assert request.submit.take_over
        assert request.submit.request_id == resume.request_id
    request.answer("ok")
    assert (await task).json()["choices"][0]["text"] == "ok"


async def test_every_prompt_of_a_request_moves(client: Client, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "prompt": ["ab", "cd"]}))
    lost, other = client.mesh.outputs, client.mesh.second_outputs
    request, kept = await lost.next_request(), await other.next_request()
    request.send("x", [1])
    await dealt(request)
    lost.sessions[-1].end()
    again = await other.next_request()
    assert again.submit.request_id == request.submit.request_id != kept.submit.request_id
    again.answer("y")
    kept.answer("z")
    assert sorted(choice["text"] for choice in (await task).json()["choices"]) == ["xy", "z"]


async def test_one_that_leaves_gets_no_new_request_and_finishes_what_it_has(client: Client) -> None:
    task, request, other = await client.begin()
    owner(client.mesh, other).sessions[-1].frames.put_nowait(ProcessFrame(leaving=True))
    await dealt(request)
    for _ in range(3):
        new, there, _ = await client.begin()
        assert there._session in other.sessions
        there.answer("new")
        await new
    request.answer("old")
    assert (await task).json()["choices"][0]["text"] == "old"


async def test_a_request_that_is_ended_with_try_elsewhere_moves_with_all_its_samples(client: Client) -> None:
    task, request, other = await client.begin(n=2)
    request.send("a", [1], 1)
    request.fail(MOVE)
    again = await other.next_request()
    await asyncio.wait_for(request.cancelled.wait(), SOON)
    assert list(again.submit.journals) == [SampleJournal(sample_index=1, token_ids=[1], emitted_text_bytes=1)]
    request.send("late", [9], 0)
    again.send("b", [2], 0)
    again.send("c", [3], 1)
    again.finish(sample_index=0)
    again.finish(sample_index=1)
    assert [choice["text"] for choice in (await task).json()["choices"]] == ["b", "ac"]


async def test_a_request_that_all_refuse_is_an_overload(client: Client) -> None:
    task, request, other = await client.begin()
    request.fail(TryElsewhere("full", retry_after=2))
    (await other.next_request()).fail(TryElsewhere("full too", retry_after=3))
    response = await task
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["code"] == "resource_exhausted"


async def test_without_a_budget_a_refused_request_asks_no_other(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    task, request, other = await client.begin()
    request.fail(TryElsewhere("full", retry_after=2))
    response = await task
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert other.requests.empty()


async def test_a_request_whose_output_processors_fall_silent_one_after_the_other_goes_on_when_one_is_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
    task, _, other = await client.begin()
    owner(client.mesh, other).sessions[-1].lose(SILENT)
    await other.next_request()  # the first retry is free
    other.sessions[-1].lose(SILENT)
    (await asyncio.wait_for(_next_of_either(client), SOON)).answer("ok")
    assert (await task).json()["choices"][0]["text"] == "ok"


async def test_an_accepted_request_waits_while_all_are_full(client: Client) -> None:
    task, request, other = await client.begin()
    request.send("a", [1])
    await dealt(request)
    owner(client.mesh, other).sessions[-1].end()
    (await other.next_request()).fail(TryElsewhere("full"))
    again = await asyncio.wait_for(_next_of_either(client), SOON)
    assert [list(journal.token_ids) for journal in again.submit.journals] == [[1]]
    again.answer("b")
    assert (await task).json()["choices"][0]["text"] == "ab"


async def _next_of_either(client: Client) -> FakeRequest:
    parts = client.mesh.outputs, client.mesh.second_outputs
    while all(part.requests.empty() for part in parts):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return await next(part for part in parts if not part.requests.empty()).next_request()


async def test_a_request_that_all_refuse_because_they_leave_waits_for_one(client: Client) -> None:
    task, request, other = await client.begin()
    await both_leave(client)
    request.fail(MOVE)
    await dealt(request)
    assert other.requests.empty()
    other.sessions[-1].end()  # it comes back
    (await other.next_request()).answer("fine")
    assert (await task).json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize("settings", [{"request_timeout": 30.0}])
async def test_the_rest_of_the_time_and_the_count_of_dead_engines_move_along(client: Client) -> None:
    task, request, other = await client.begin()
    frame = ProcessFrame(engine_death_slots=[request.submit.slot])
    request._session.frames.put_nowait(frame)
    await dealt(request)
    pass_time(5)
    owner(client.mesh, other).sessions[-1].end()
    again = await other.next_request()
    assert again.submit.engine_deaths == 1
    assert 0 < again.submit.timeout.ToSeconds() < request.submit.timeout.ToSeconds() - 4
    again.answer("x")
    assert (await task).status_code == 200


@pytest.mark.parametrize("settings", [{"request_timeout": 15.0}])
async def test_the_time_of_a_request_that_waits_ends(client: Client) -> None:
    task, request, other = await client.begin()
    await both_leave(client)
    request.fail(MOVE)
    await dealt(request)
    pass_time(16)
    await settle()
    assert (await task).status_code == 504
    other.sessions[-1].end()
    owner(client.mesh, other).sessions[-1].end()
    new, there, _ = await client.begin()
    there.answer("new")
    await new
    assert client.mesh.outputs.requests.empty()
    assert client.mesh.second_outputs.requests.empty()


async def test_log_probabilities_of_a_prompt_that_arrived_are_not_asked_for_again(client: Client) -> None:
    task, request, other = await client.begin(prompt=[1, 2, 3, 4], prompt_logprobs=0)
    columns = Logprobs(sampled=[-1, -2], rank=[1, 2])
    part = SlotTextLogprobs(
        slot=request.submit.slot, prompt=True, token_index=1, logprobs=columns, sampled_text=[b"2", b"3"]
    )
    request._session.frames.put_nowait(ProcessFrame(logprobs=[part]))
    await dealt(request)
    owner(client.mesh, other).sessions[-1].end()
    again = await other.next_request()
    assert (again.submit.num_prompt_logprobs, len(again.submit.journals)) == (2, 0)
    columns = Logprobs(sampled=[-3], rank=[3])
    rest = SlotTextLogprobs(slot=again.submit.slot, prompt=True, token_index=3, logprobs=columns, sampled_text=[b"4"])
    again._session.frames.put_nowait(ProcessFrame(logprobs=[rest]))
    again.answer("x")
    prompt = (await task).json()["choices"][0]["prompt_logprobs"]
    assert [each and [row["logprob"] for row in each.values()] for each in prompt] == [None, [-1.0], [-2.0], [-3.0]]


@pytest.mark.parametrize("settings", [{"max_kept_prompt_bytes": 8}])
async def test_a_prompt_beyond_the_budget_is_not_kept(client: Client) -> None:
    task, request, other = await client.begin()  # two tokens fill the budget
    large, there, _ = await client.begin(stream=True)
    assert there._session in other.sessions
    there.send("x", [1])
    await dealt(there)
    other.sessions[-1].end()
    events = (await large).text.split("\n\n")
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "unavailable"
    owner(client.mesh, other).sessions[-1].end()
    (await asyncio.wait_for(_next_of(client.mesh), SOON)).answer("kept")
    assert (await task).json()["choices"][0]["text"] == "kept"
    assert request.submit.prompt.token_ids


async def _next_of(mesh: FakeMesh) -> FakeRequest:
    while True:
        for part in (mesh.outputs, mesh.second_outputs):
            if not part.requests.empty():
                return part.requests.get_nowait()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("progress", [False, True])
async def test_a_request_that_ends_output_processors_by_itself_is_given_up(client: Client, progress: bool) -> None:
    task, request, _ = await client.begin()
    for number in range(MAX_LOSSES_ALONE):
        if number:
            request = await asyncio.wait_for(_next_of(client.mesh), SOON)
        if progress:
            request.send("x", [number])
            await dealt(request)
        for part in (client.mesh.outputs, client.mesh.second_outputs):
            part.epoch += 1  # the one that ends now is another process afterwards
        request._session.end()
    if progress:
        (await asyncio.wait_for(_next_of(client.mesh), SOON)).answer("y")
        assert (await task).json()["choices"][0]["text"] == "x" * MAX_LOSSES_ALONE + "y"
    else:
        response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (500, "output_processor_killer")
        assert response.headers["x-should-retry"] == "false"


async def test_a_beam_search_survives(client: Client) -> None:
    task, _, other = await client.begin(prompt=[1, 2], max_tokens=1, use_beam_search=True, n=2)
    owner(client.mesh, other).sessions[-1].end()
    again = await other.next_request()
    ids = [5, 6, 7, 8]
    columns = Logprobs(sampled=[-1], rank=[1], top=4, token_id=ids, logprob=[-1, -2, -3, -4])
    texts = [bytes([each]) for each in ids]
    logprobs = SlotTextLogprobs(
        slot=again.submit.slot, logprobs=columns, sampled_text=texts[:1], token_text=texts, token_index=0
    )
    frame = ProcessFrame(
        slot=[again.submit.slot], text=["x"], token_index=[0], num_tokens=[1], token_ids=[5], logprobs=[logprobs]
    )
    again._session.frames.put_nowait(frame)
    again._num_tokens[0] = 1
    again.finish()
    response = await task
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 2


async def test_a_request_that_was_found_moves_to_one_that_did_not_have_it(
    client: Client, http: httpx.AsyncClient
) -> None:
    """Not to have a request is not to refuse it: the client got 503 although one was free."""
    client.mesh.second_outputs.sessions[-1].end()
    while len(client.mesh.second_outputs.sessions) < 2 or await client.num_serving() < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task = asyncio.create_task(http.post("/v1/completions", json=BODY, headers={"Idempotency-Key": "k"}))
    parts = client.mesh.outputs, client.mesh.second_outputs
    sought = {asyncio.create_task(part.next_resume()): part for part in parts}
    (first,), _ = await asyncio.wait(sought, return_when=asyncio.FIRST_COMPLETED)
    first.result()[0].fail(LOST)
    await asyncio.wait(sought)
    (second,) = set(sought) - {first}
    second.result()[0].fail(MOVE)
    request = await sought[first].next_request()
    request.answer("ok")
    assert (await task).json()["choices"][0]["text"] == "ok"
