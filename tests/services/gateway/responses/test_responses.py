"""OpenAI's Responses API over HTTP, also as OpenAI's client reads it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import LIMITS, MODEL, SOON, FakeMesh
from tokenloom.request import errors
from tokenloom.services.gateway.endpoints.generation_endpoint import REPEAT_SECONDS
from tokenloom.services.gateway.http import held_table
from tokenloom.services.gateway.http.held_table import HeldTable
from tokenloom.services.gateway.responses.response_store import ResponseStore
from tokenloom.v1 import output_processor_pb2, types_pb2

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "description": "It.", "parameters": SCHEMA}]
CALL = ("I ask.\n", '<tool_call>\n{"name": "get_', 'weather", "arguments": {"city"', ': "Oslo"}}\n</tool_call>')


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


def last_chat(mesh: FakeMesh) -> Any:
    """The only conversation that a tokenizer was given since the last call."""
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    mesh.tokenizer.chats.clear()
    mesh.second_tokenizer.chats.clear()
    return json.loads(chat.messages_json)


@asynccontextmanager
async def openai_client(directory: Path, **settings: Any) -> AsyncIterator[tuple[FakeMesh, openai.AsyncOpenAI]]:
    """OpenAI's client of a gateway that reads Hermes' tool calls."""
    async with FakeMesh(directory).gateway(**{"tool_call_parser": "hermes", **settings}) as mesh:
        url = f"http://{mesh.http_address}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="a key", max_retries=0)
        yield mesh, client
        await client.close()


async def test_a_whole_response(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = ["Hel", "lo"]
        response = await client.responses.create(model=MODEL, input="hi", instructions="Be brief.", temperature=0.5)
        assert (response.status, response.output_text, response.temperature) == ("completed", "Hello", 0.5)
        assert response.usage is not None
        assert (response.usage.output_tokens, response.usage.input_tokens_details.cached_tokens) == (5, 1)
        assert last_chat(mesh) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


async def test_a_stream_as_openais_client_reads_it(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = CALL
        async with client.responses.stream(model=MODEL, input="The weather?", tools=TOOLS) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        message, call = response.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Oslo"}')
        assert (message.type, response.output_text) == ("message", "I ask.")


async def test_text_after_a_call_in_the_same_piece_keeps_its_place(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = ('<tool_call>{"name": "get_weather", "arguments": {"city": ', '"Oslo"}}</tool_call>So.')
        async with client.responses.stream(model=MODEL, input="The weather?", tools=TOOLS) as stream:
            streamed = await stream.get_final_response()
        whole = await client.responses.create(model=MODEL, input="The weather?", tools=TOOLS)
    for response in (streamed, whole):
        call, message = response.output
        assert call.type == "function_call"
        assert message.type == "message"
        assert (call.arguments, response.output_text) == ('{"city": "Oslo"}', "So.")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_an_operator_ended_has_failed(
    mesh: FakeMesh, http: httpx.AsyncClient, stream: bool
) -> None:
    task = asyncio.create_task(post(http, stream=stream))
    (await mesh.outputs.next_request()).answer("Well", reason=types_pb2.FINISH_REASON_ABORT)
    answer = await task
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    response = events[-1]["response"] if stream else answer.json()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Well")
    assert not stream or events[-1]["type"] == "response.failed"


async def test_a_conversation_continues_with_the_result_of_a_call(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = CALL
        first = await client.responses.create(model=MODEL, input="The weather?", tools=TOOLS)
        call = first.output[1]
        assert call.type == "function_call"
        last_chat(mesh)
        mesh.outputs.auto = ("It rains.",)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await client.responses.create(
            model=MODEL, input=[result], previous_response_id=first.id, tools=TOOLS, instructions="Be brief."
        )
        assert second.output_text == "It rains."
        function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
        assert last_chat(mesh) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "The weather?"},
            {
                "role": "assistant",
                "content": "I ask.",
                "tool_calls": [{"type": "function", "function": function, "id": call.call_id}],
            },
            {"role": "tool", "content": "rain", "tool_call_id": call.call_id},
        ]


async def test_a_limit_beyond_the_room_in_the_context_is_cut(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, max_output_tokens=32_000))
    request = await mesh.outputs.next_request()
    left = LIMITS.max_model_len - len(request.submit.prompt.token_ids)
    assert request.submit.sampling_params.max_tokens == left > 64
    request.answer("x", reason=types_pb2.FINISH_REASON_LENGTH)
    response = (await task).json()
    assert (response["status"], response["max_output_tokens"]) == ("incomplete", 32_000)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    refused = await post(http, max_output_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_output_tokens")


REASONED = "<think>Hm."
CUT = '<think>Hm.</think>I ask.<tool_call>{"name": "get_weather", "arguments": {"city": "Os'
AFTER = '<think>Hm.</think>I <tool_call>{"name": "get_weather", "arguments": {}}</tool_call> ask.'


@pytest.mark.parametrize("output", [REASONED, CUT, AFTER], ids=["only reasoning", "a cut call", "text after a call"])
async def test_any_answer_is_accepted_as_history(socket_dir: Path, output: str) -> None:
    async with openai_client(socket_dir, reasoning_parser="qwen3") as (mesh, client):
        mesh.outputs.auto = (output,)
        first = await client.responses.create(model=MODEL, input="The weather?", tools=TOOLS)
        last_chat(mesh)
        question: dict[str, Any] = {"role": "user", "content": "The weather?"}
        items: list[Any] = [question, *(item.to_dict() for item in first.output), {"role": "user", "content": "So?"}]
        mesh.outputs.auto = ("It rains.",)
        await client.responses.create(model=MODEL, input=items)
        by_items = last_chat(mesh)
        await client.responses.create(model=MODEL, input="So?", previous_response_id=first.id)
        assert last_chat(mesh) == by_items
        _, turn, _ = by_items
        assert turn["reasoning_content"] == "Hm."
        assert turn["content"] == ("" if output is REASONED else "I ask.")
        arguments = [call["function"]["arguments"] for call in turn.get("tool_calls", ())]
        assert arguments == {REASONED: [], CUT: ['{"city": "Os'], AFTER: [{}]}[output]


async def test_the_client_sends_the_whole_conversation_itself(socket_dir: Path) -> None:
    async with openai_client(socket_dir, reasoning_parser="qwen3", max_stored_response_bytes=0) as (mesh, client):
        mesh.outputs.auto = ("<think>Hm.</think>", *CALL)
        first = await client.responses.create(model=MODEL, input="The weather?", tools=TOOLS)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        last_chat(mesh)
        turns: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "The weather?"}]}]
        turns += [item.to_dict() for item in first.output]
        mesh.outputs.auto = ("It rains.",)
        await client.responses.create(model=MODEL, input=turns)
        _, turn = last_chat(mesh)
        assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("Hm.", "I ask.", 1)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)


async def test_stored_responses_belong_to_their_tenant(socket_dir: Path) -> None:
    async with openai_client(socket_dir, api_key=("a key", "another key")) as (mesh, client):
        mesh.outputs.auto = ("Hello",)
        kept = await client.responses.create(model=MODEL, input="hi")
        dropped = await client.responses.create(model=MODEL, input="hi", store=False)
        assert (await client.responses.retrieve(kept.id)).output_text == "Hello"
        stranger = client.with_options(api_key="another key")
        for asking, response_id in ((stranger, kept.id), (client, dropped.id)):
            with pytest.raises(openai.NotFoundError):
                await asking.responses.retrieve(response_id)
        await client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model=MODEL, input="hi", previous_response_id=kept.id)


async def test_the_store_drops_the_oldest_responses(socket_dir: Path) -> None:
    async with openai_client(socket_dir, max_stored_response_bytes=4000) as (mesh, client):
        mesh.outputs.auto = ("Hello",)
        ids = [(await client.responses.create(model=MODEL, input="hi")).id for _ in range(6)]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[0])
        assert (await client.responses.retrieve(ids[-1])).id == ids[-1]


async def test_a_response_in_the_background(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        assert begun.status == "queued"
        (await mesh.outputs.next_request()).answer("Hello")
        while (response := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            pass
        assert (response.status, response.output_text, response.id) == ("completed", "Hello", begun.id)


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
    is_full = iter([True, True])  # as the body has arrived, and when it was read
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


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("stream=yes", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(http: httpx.AsyncClient, query: str, where: str) -> None:
    answer = await http.get(f"/v1/responses/resp_1?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, where)


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


async def test_an_answer_that_is_cut_is_incomplete(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, max_output_tokens=1, stream=True))
    request = await mesh.outputs.next_request()
    assert request.submit.sampling_params.max_tokens == 1
    request.answer("x", reason=types_pb2.FINISH_REASON_LENGTH)
    last = (await task).text.strip().split("\n\n")[-1]
    name, data = last.split("\n")
    assert name == "event: response.incomplete"
    assert json.loads(data.removeprefix("data: "))["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_fields_of_chats_have_their_own_names_here(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    task = asyncio.create_task(post(http, text={"format": form}, reasoning={"effort": "low"}, seed=3))
    request = await mesh.outputs.next_request()
    params = request.submit.sampling_params
    assert (json.loads(params.structured_outputs.json), params.seed) == (SCHEMA, 3)
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    assert json.loads(chat.template_kwargs_json) == {"reasoning_effort": "low"}
    request.answer("{}")
    assert (await task).status_code == 200


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_may_be_called(socket_dir: Path, mode: str) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        tools = [*TOOLS, {"type": "function", "name": "get_time"}]
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "get_time"}]}
        task = asyncio.create_task(post(http, tools=tools, tool_choice=choice))
        request = await mesh.outputs.next_request()
        assert request.submit.sampling_params.HasField("structured_outputs") == (mode == "required")
        (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
        assert [tool["function"]["name"] for tool in json.loads(chat.tools_json)] == ["get_time"]
        request.answer("x")
        await task


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "all"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"conversation": 3}, "conversation"),
        ({"conversation": "resp_1"}, "conversation"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
async def test_a_wrong_body_is_refused_by_field(http: httpx.AsyncClient, fields: dict[str, Any], where: str) -> None:
    response = await post(http, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == where, response.text


async def test_tools_that_run_at_openai_are_left_out_and_named(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        tools = [{"type": "web_search", "external_web_access": False}, {"type": "function", "name": "get_time"}]
        response = await post(http, tools=tools)
        assert response.headers["x-tokenloom-ignored"] == "tools[].web_search"
        (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
        assert [tool["function"]["name"] for tool in json.loads(chat.tools_json)] == ["get_time"]
        assert (await post(http, tools=tools[:1])).status_code == 200


async def test_a_function_of_a_namespace_is_called_by_its_own_name(socket_dir: Path) -> None:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = [text.replace("get_", "met.get_") for text in CALL]
        tools: list[Any] = [{"type": "namespace", "name": "met", "description": "Weather.", "tools": TOOLS}]
        answer = await client.responses.create(model=MODEL, input="The weather?", tools=tools)
        call = answer.output[-1]
        assert call.type == "function_call"
        assert (call.namespace, call.name, call.arguments) == ("met", "get_weather", '{"city": "Oslo"}')
        last_chat(mesh)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items: list[Any] = [{"role": "user", "content": "hi"}, call.to_dict(), result]
        await client.responses.create(model=MODEL, input=items, tools=tools)
        assert last_chat(mesh)[1]["tool_calls"][0]["function"]["name"] == "met.get_weather"
        again: list[Any] = [result]
        await client.responses.create(model=MODEL, input=again, tools=tools, previous_response_id=answer.id)
        assert last_chat(mesh)[1]["tool_calls"][0]["function"]["name"] == "met.get_weather"
        response = await client.responses.with_raw_response.create(model=MODEL, input="hi", tools=tools)
        assert response.headers["x-tokenloom-ignored"] == "tools[].description"
