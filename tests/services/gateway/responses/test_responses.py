"""OpenAI's Responses API over HTTP, also as OpenAI's client reads it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tests.services.gateway.responses.response_clients import CALL, SCHEMA, TOOLS, last_chat, openai_client, post
from tokenloom.v1 import types_pb2


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
