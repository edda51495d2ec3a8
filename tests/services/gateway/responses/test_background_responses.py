"""Responses in the background: read again, taken over, cancelled, repeated."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import LIMITS, MODEL, SOON, FakeMesh
from tests.services.gateway.responses.response_clients import CALL, TOOLS, last_chat, openai_client, post
from tokenloom.request import errors
from tokenloom.services.gateway.endpoints.generation_endpoint import REPEAT_SECONDS
from tokenloom.services.gateway.http import held_table
from tokenloom.services.gateway.http.held_table import HeldTable
from tokenloom.services.gateway.responses.response_store import ResponseStore
from tokenloom.v1 import output_processor_pb2


async def test_a_response_in_the_background(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        assert begun.status == "in_progress"
        (await mesh.outputs.next_request()).answer("Hello")
        while (response := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            pass
        assert (response.status, response.output_text, response.id) == ("completed", "Hello", begun.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gets_an_id_once_an_output_processor_has_the_response(socket_dir: Path, stream: bool) -> None:
    """A gateway was killed while its tokenizer stood still: the client fetched its response elsewhere, and got 404."""
    async with openai_client(socket_dir) as (mesh, _), mesh.http() as http:
        mesh.outputs.recall_fails = mesh.second_outputs.recall_fails = True
        body = {"model": MODEL, "input": "hi", "background": True, "stream": stream}
        call = asyncio.create_task(http.post("/v1/responses", json=body))
        request = await mesh.outputs.next_request()
        await settle(200)
        assert not call.done()
        mesh.outputs.recall_fails = False
        if not stream:
            assert (await call).json()["status"] == "in_progress"
        request.answer("Hello")
        assert "Hello" in (await call).text or not stream


@pytest.mark.parametrize("ends", ["fails", "leaves"])
async def test_what_no_output_processor_will_have_is_not_waited_for(socket_dir: Path, ends: str) -> None:
    async with openai_client(socket_dir) as (mesh, _), mesh.http() as http:
        mesh.outputs.recall_fails = mesh.second_outputs.recall_fails = True
        call = asyncio.create_task(http.post("/v1/responses", json={"model": MODEL, "input": "hi", "background": True}))
        request = await mesh.outputs.next_request()
        if ends == "leaves":
            call.cancel()
            await settle(50)
            assert not request.cancelled.is_set(), "the response goes on"
            mesh.outputs.recall_fails = False
            request.answer("Hello")
            return
        request.fail(errors.Internal("the engine is broken"))
        response = (await call).json()
        assert (await http.get(f"/v1/responses/{response['id']}")).json()["status"] == "failed"


async def events_after(client: openai.AsyncOpenAI, response_id: str, number: int) -> list[Any]:
    stream = await client.responses.retrieve(response_id, stream=True, starting_after=number)
    return [event async for event in stream]


async def test_a_stream_in_the_background_is_read_again_from_any_event(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = CALL
        create = partial(client.responses.create, model=MODEL, input="The weather?", tools=TOOLS, background=True)
        events = [event async for event in await create(stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        for number in range(len(events)):
            assert await events_after(client, events[0].response.id, number) == events[number + 1 :]
        assert [each async for each in await client.responses.retrieve(events[0].response.id, stream=True)] == events
        assert (await client.responses.retrieve(events[0].response.id)).output_text == "I ask."
        whole = await create()
        with pytest.raises(openai.BadRequestError, match="not begun with background and stream"):
            await events_after(client, whole.id, 0)


async def test_a_stream_in_the_background_outlives_its_connection(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        begun = await anext(aiter(stream))
        request = await mesh.outputs.next_request()
        await stream.close()
        request.answer("Hello", " you")
        events = await events_after(client, begun.response.id, begun.sequence_number)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello you"
        assert events[-1].type == "response.completed"


async def test_a_stream_that_could_not_be_held_at_first_is_not_held_with_half_of_its_request(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a slot gets free after the request was read: another gateway would answer that its body is empty."""
    table = HeldTable(1)
    monkeypatch.setattr(held_table, "HeldTable", lambda num_slots: table)
    monkeypatch.setattr(HeldTable, "may_arrive", False)
    is_full = iter([True])  # when the body was read
    monkeypatch.setattr(HeldTable, "is_full", property(lambda self: next(is_full, False)))
    async with openai_client(socket_dir, hold_connections=str(socket_dir)) as (mesh, client):
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        assert not [record.past.request for record in table.records()]
        (await mesh.outputs.next_request()).answer("Hello")
        await stream.close()
        assert next(is_full, None) is None


async def test_the_last_events_count_among_the_bytes(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones have the whole text four times, and came after the response was counted."""
    stores: list[ResponseStore] = []
    original = ResponseStore.__init__

    def observed(self: ResponseStore, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        stores.append(self)

    monkeypatch.setattr(ResponseStore, "__init__", observed)
    async with openai_client(socket_dir) as (mesh, client):
        create = client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        begun = asyncio.create_task(create)
        request = await mesh.outputs.next_request()
        request.answer("word " * 50_000)
        events = [event async for event in await begun]
        assert events[-1].type == "response.completed"
        (store,) = (store for store in stores if store._num_bytes)
        log = store.get(events[0].response.id, "").log
        assert log is not None
        assert store._num_bytes > log.num_bytes


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_of_another_gateway_is_continued(socket_dir: Path, stream: bool) -> None:
    """Another one begins it, and this one finds what it was begun with at the output processor."""
    async with openai_client(socket_dir) as (mesh, client), mesh.http() as http:
        mesh.outputs.auto = ("Well", ".")
        first = await client.responses.create(model=MODEL, input="hi")
        mesh.outputs.auto = None
        body = {"model": MODEL, "input": "The weather?", "previous_response_id": first.id, "tools": TOOLS}
        begun = asyncio.create_task(post(http, **body, background=True, stream=stream))
        submit = (await mesh.outputs.next_request()).submit
        response_id = f"resp_{submit.request_id}"
        assert submit.recipe
    recalled = output_processor_pb2.RecallResponse(recipe=submit.recipe, fingerprint=submit.fingerprint)
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.recalled[submit.request_id] = recalled
        recalled.is_attended = True  # by a gateway that lives
        assert (await client.responses.retrieve(response_id)).status == "in_progress"
        recalled.is_attended = False
        if not stream:
            assert (await client.responses.retrieve(response_id)).status == "in_progress"
        reading = asyncio.create_task(events_after(client, response_id, 1)) if stream else None
        request, resume = await mesh.outputs.next_resume()
        assert (resume.request_id, resume.fingerprint) == (submit.request_id, submit.fingerprint)
        request.answer(*CALL)
        if reading is not None:
            events = await reading
            assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
        while (response := await client.responses.retrieve(response_id)).status == "in_progress":
            pass
        assert (response.id, response.status, response.output_text) == (response_id, "completed", "I ask.")
        contents = [turn["content"] for turn in last_chat(mesh)]
        assert contents == ["hi", "Well.", "The weather?"]
    begun.cancel()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": "hi"}, 200),
        ({"input": [{"type": "item_of_a_newer_release"}]}, 503),
        ({"input": "hi", "model": "adapter-that-others-know"}, 503),
        ("a body of a newer release", 503),
    ],
)
async def test_a_response_that_this_gateway_cannot_continue_is_no_fault_of_the_client(
    mesh: FakeMesh, http: httpx.AsyncClient, body: Any, status: int
) -> None:
    if isinstance(body, dict):
        body = {"model": MODEL, "background": True, **body}
    recipe = json.dumps({"body": body, "created": 1, "response_id": f"resp_{'ab' * 20}"}).encode()
    mesh.outputs.recalled["ab" * 20] = output_processor_pb2.RecallResponse(recipe=recipe, is_attended=True)
    assert (await http.get(f"/v1/responses/resp_{'ab' * 20}")).status_code == status


async def test_a_response_that_was_deleted_does_not_come_back(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        request = await mesh.outputs.next_request()
        mesh.outputs.recalled[request.submit.request_id] = output_processor_pb2.RecallResponse(
            recipe=request.submit.recipe, fingerprint=request.submit.fingerprint
        )
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


async def test_a_response_that_another_gateway_takes_over_is_forgotten(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        begun = await anext(aiter(stream))
        request = await mesh.outputs.next_request()
        mesh.outputs.recalled[request.submit.request_id] = output_processor_pb2.RecallResponse(
            recipe=request.submit.recipe, fingerprint=request.submit.fingerprint, is_attended=True
        )
        request.fail(errors.Aborted("The answer continues in another call."))
        with pytest.raises(openai.APIError, match="continues in another call"):
            assert [event async for event in stream]
        assert (await client.responses.retrieve(begun.response.id)).status == "in_progress"


async def test_a_silent_stream_in_the_background_is_kept_alive(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
    async with http.stream("POST", "/v1/responses", json=body) as response:
        lines, request = response.aiter_lines(), await mesh.outputs.next_request()

        async def until(wanted: str) -> None:
            while await anext(lines) != wanted:
                pass

        await until("event: response.in_progress")
        reading = asyncio.create_task(until(": keep-alive"))
        await settle()
        pass_time(REPEAT_SECONDS)
        await asyncio.wait_for(reading, SOON)
        request.answer("Hello")
        await until("event: response.completed")


async def test_a_stream_in_the_background_that_fails_says_so(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        create = partial(client.responses.create, model=MODEL, background=True, stream=True)
        stream = await create(input="hi")
        (await mesh.outputs.next_request()).fail(errors.Internal("the engine is broken"))
        events = [event async for event in stream]
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
        events = [event async for event in await create(input="x" * (LIMITS.max_model_len + 9))]
        assert [event.type for event in events] == ["response.created", "response.failed"]
        assert events[-1].response.error.code == "context_length_exceeded"


async def test_a_response_in_the_background_is_cancelled(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        request = await mesh.outputs.next_request()
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await request.cancelled.wait()
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"


@pytest.mark.parametrize("ends", ["cancel", "delete"])
@pytest.mark.parametrize("key", [None, "a key"])
async def test_a_response_that_its_client_ends_is_not_computed_on(socket_dir: Path, ends: str, key: str | None) -> None:
    """Nor with a key, by which a lost client could repeat it."""
    headers = {} if key is None else {"Idempotency-Key": key}
    async with openai_client(socket_dir) as (mesh, client), mesh.http() as http:
        begun = await client.responses.create(model=MODEL, input="hi", background=True, extra_headers=headers)
        request = await mesh.outputs.next_request()
        await getattr(client.responses, ends)(begun.id)
        await asyncio.wait_for(request.cancelled.wait(), SOON)
        assert "tokenloom_gateway_unattended_requests 0.0" in (await http.get("/metrics")).text


@pytest.mark.parametrize("turns", range(0, 40, 2))
async def test_a_response_is_cancelled_at_any_turn_of_its_beginning(socket_dir: Path, turns: int) -> None:
    async with openai_client(socket_dir) as (mesh, _), mesh.http() as http:
        body = {"model": MODEL, "input": "hi", "background": True}
        begun = (await http.post("/v1/responses", json=body, headers={"Idempotency-Key": "a key"})).json()
        await settle(turns)
        cancelled = await http.post(f"/v1/responses/{begun['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        await settle()
        assert "tokenloom_gateway_unattended_requests 0.0" in (await http.get("/metrics")).text
        assert mesh.service is not None
        while not mesh.outputs.requests.empty():
            request = await mesh.outputs.next_request()
            await asyncio.wait_for(request.cancelled.wait(), SOON)


async def test_a_repeat_in_the_background_gets_the_response_that_was_begun(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client), mesh.http() as http:
        create = partial(client.responses.create, model=MODEL, background=True, extra_headers={"Idempotency-Key": "k"})
        begun = await create(input="hi")
        request = await mesh.outputs.next_request()
        assert (await create(input="hi")).id == begun.id
        with pytest.raises(openai.UnprocessableEntityError, match="differs"):
            await create(input="hello")
        request.answer("Hello")
        while (await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            pass
        again = await create(input="hi")
        assert (again.id, again.status, again.output_text) == (begun.id, "completed", "Hello")
        other = await client.responses.create(model=MODEL, input="hi", background=True)
        assert other.id != begun.id, "without a key"
        await client.responses.cancel(other.id)
        assert "tokenloom_gateway_unattended_requests 0.0" in (await http.get("/metrics")).text


async def test_a_repeat_of_what_was_cancelled_in_the_background_begins_anew(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        create = partial(client.responses.create, model=MODEL, background=True, extra_headers={"Idempotency-Key": "k"})
        begun = await create(input="hi")
        await mesh.outputs.next_request()
        await client.responses.cancel(begun.id)
        again = await create(input="hi")
        assert again.id != begun.id
        (await mesh.outputs.next_request()).answer("Hello")
        while (response := await client.responses.retrieve(again.id)).status in ("queued", "in_progress"):
            pass
        assert response.output_text == "Hello"


async def test_a_response_in_the_background_fails(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        (await mesh.outputs.next_request()).fail(errors.Internal("the engine is broken"))
        while (response := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            pass
        assert response.status == "failed"
        assert response.error is not None
        assert "broken" in response.error.message


async def test_a_context_that_is_too_long_is_named_as_such_in_the_background_too(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        begun = await client.responses.create(model=MODEL, input="x" * (LIMITS.max_model_len + 9), background=True)
        while (response := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            pass
        assert response.error is not None
        assert response.error.code == "context_length_exceeded"
        assert f"maximum context length is {LIMITS.max_model_len} tokens, but input has" in response.error.message
        assert mesh.outputs.requests.empty()
