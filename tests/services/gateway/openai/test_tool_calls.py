"""Tool calls and reasoning over HTTP, in OpenAI's form, streamed and not."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh, FakeRequest
from tests.services.gateway.openai.test_chat import events, post
from tokenloom.request.tool_format import FORMATS, to_json
from tokenloom.v1 import types_pb2

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city"],
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
CALL = ("I ask.\n", '<tool_call>\n{"name": "get_', 'weather", "arguments": {"city"', ': "Oslo"}}\n</tool_call>')
REQUIRED = {"tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@asynccontextmanager
async def gateway(directory: Path, **settings: Any) -> AsyncIterator[tuple[FakeMesh, httpx.AsyncClient]]:
    async with (
        FakeMesh(directory).gateway(**{"tool_call_parser": "hermes", **settings}) as mesh,
        mesh.http() as http,
    ):
        yield mesh, http


async def asked(mesh: FakeMesh, http: httpx.AsyncClient, **fields: Any) -> tuple["asyncio.Task[Any]", FakeRequest]:
    task = asyncio.create_task(post(http, **fields))
    return task, await mesh.outputs.next_request()


async def test_a_whole_answer_with_a_call(socket_dir: Path) -> None:
    async with gateway(socket_dir) as (mesh, http):
        mesh.outputs.auto = CALL
        (choice,) = (await post(http, tools=TOOLS)).json()["choices"]
        (call,) = choice["message"].pop("tool_calls")
        assert choice["message"] == {"role": "assistant", "content": "I ask."}
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
        assert choice["finish_reason"] == "tool_calls"
        (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
        assert json.loads(chat.tools_json) == TOOLS


async def test_a_stream_with_a_call_as_openais_client_reads_it(socket_dir: Path) -> None:
    async with gateway(socket_dir) as (mesh, _):
        mesh.outputs.auto = CALL
        client = openai.AsyncOpenAI(base_url=f"http://{mesh.http_address}/v1", api_key="none", max_retries=0)
        async with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=TOOLS
        ) as stream:
            completion = await stream.get_final_completion()
        await client.close()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I ask."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')


async def test_pieces_are_sent_as_they_arrive(socket_dir: Path) -> None:
    async with gateway(socket_dir) as (mesh, http):
        task, request = await asked(mesh, http, tools=TOOLS, stream=True, return_token_ids=True)
        for number, piece in enumerate(CALL):
            request.send(piece, [number])
            await asyncio.sleep(0)
        request.finish()
        told = [event["choices"][0] for event in events(await task)]
    calls = [call for choice in told for call in choice["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert [set(call) for call in calls[1:]] == [{"index", "function"}] * (len(calls) - 1)
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Oslo"}'
    assert [id_ for choice in told for id_ in choice.get("token_ids", ())] == [0, 1, 2, 3]
    assert told[-1]["finish_reason"] == "tool_calls"


async def test_a_named_tool_constrains_the_output_to_its_arguments(socket_dir: Path) -> None:
    async with gateway(socket_dir, tool_call_parser="none") as (mesh, http):
        task, request = await asked(mesh, http, tools=TOOLS, tool_choice=NAMED)
        constraint = request.submit.sampling_params.structured_outputs
        assert json.loads(constraint.json) == WEATHER
        request.answer('{"city"', ': "Oslo"}')
        (choice,) = (await task).json()["choices"]
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
        assert choice["finish_reason"] == "tool_calls"


async def test_a_required_tool_constrains_the_output_to_a_list_of_calls(socket_dir: Path) -> None:
    async with gateway(socket_dir, tool_call_parser="none") as (mesh, http):
        task, request = await asked(mesh, http, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        schema = json.loads(request.submit.sampling_params.structured_outputs.json)
        good = [{"name": "get_weather", "parameters": {"city": "Oslo", "unit": "C"}}]
        jsonschema.validate(good, schema)
        for bad in (
            [],
            good * 2,
            [{"name": "get_weather", "parameters": {}}],
            [{"name": "get_weather", "parameters": {"city": "Oslo", "unit": "K"}}],
            [{"name": "other", "parameters": {}}],
        ):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(bad, schema)
        request.answer(json.dumps(good)[:-9], reason=types_pb2.FINISH_REASON_LENGTH)
        (choice,) = (await task).json()["choices"]
        assert choice["finish_reason"] == "length", "it was cut off"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
async def test_a_forced_call_is_written_as_the_model_writes_calls(socket_dir: Path, choice: Any) -> None:
    async with gateway(socket_dir) as (mesh, http):
        task, request = await asked(mesh, http, tools=TOOLS, tool_choice=choice)
        tag = json.loads(request.submit.sampling_params.structured_outputs.structural_tag)["format"]
        assert [each["begin"].split('"')[3] for each in tag["tags"]] == ["get_weather", "get_time"][: len(tag["tags"])]
        assert len(tag["tags"]) == (1 if choice is NAMED else 2)
        request.answer(*CALL[1:])
        (choice_,) = (await task).json()["choices"]
    assert choice_["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert (choice_["message"]["content"], choice_["finish_reason"]) == (None, "tool_calls")


async def test_one_call_at_most_in_each_sample(socket_dir: Path) -> None:
    async with gateway(socket_dir) as (mesh, http):
        mesh.outputs.auto = (*CALL[1:], *CALL[1:])
        for parallel, number in ((False, 1), (None, 2)):
            (choice,) = (await post(http, tools=TOOLS, parallel_tool_calls=parallel)).json()["choices"]
            assert len(choice["message"]["tool_calls"]) == number
        chunks = events(await post(http, tools=TOOLS, stream=True, parallel_tool_calls=False))
        indices = {call["index"] for event in chunks for call in event["choices"][0]["delta"].get("tool_calls", ())}
        assert indices == {0}


async def test_without_a_choice_text_stays_text(socket_dir: Path) -> None:
    async with gateway(socket_dir) as (mesh, http):
        mesh.outputs.auto = CALL
        for fields in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}, {}):
            (choice,) = (await post(http, **fields)).json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": "".join(CALL)}
            assert choice["finish_reason"] == "stop"


async def test_marks_that_are_special_tokens_are_kept(socket_dir: Path) -> None:
    async with gateway(socket_dir, tool_call_parser="mistral") as (mesh, http):
        task, request = await asked(mesh, http, tools=TOOLS)
        assert request.submit.text.HasField("skip_special_tokens")
        assert not request.submit.text.skip_special_tokens
        request.answer('[TOOL_CALLS][{"name": "get_time", "arguments": {}}]')
        (choice,) = (await task).json()["choices"]
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9


async def test_the_parser_is_chosen_by_the_template(socket_dir: Path) -> None:
    fake = FakeMesh(socket_dir)
    for tokenizer in (fake.tokenizer, fake.second_tokenizer):
        tokenizer.tool_call_parser, tokenizer.reasoning_parser = "hermes", "qwen3"
    async with fake.gateway() as mesh, mesh.http() as http:
        mesh.outputs.auto = ("<think>Hm.</think>", *CALL[1:])
        (choice,) = (await post(http, tools=TOOLS)).json()["choices"]
    assert choice["message"]["reasoning"] == "Hm."
    assert len(choice["message"]["tool_calls"]) == 1


async def test_what_the_tokenizer_has_derived_comes_first(socket_dir: Path) -> None:
    fake = FakeMesh(socket_dir)
    for tokenizer in (fake.tokenizer, fake.second_tokenizer):
        tokenizer.tool_call_parser = "hermes"
        tokenizer.tool_format_json = to_json(FORMATS["qwen3_coder"])
    async with fake.gateway() as mesh, mesh.http() as http:
        mesh.outputs.auto = (
            "I ask.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
            "lo\n</parameter>\n</function>\n</tool_call>",
        )
        (choice,) = (await post(http, tools=TOOLS)).json()["choices"]
        stream = events(await post(http, tools=TOOLS, stream=True))
    function = choice["message"]["tool_calls"][0]["function"]
    assert function == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"]["content"] == "I ask."
    calls = [call for event in stream for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Os', 'lo"}'], "as they are generated"


async def test_bad_tools_are_refused(socket_dir: Path) -> None:
    async with gateway(socket_dir, tool_call_parser="none") as (mesh, http):
        response = await post(http, tools=TOOLS)  # the gateway has no parser that could read the calls
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tool_choice"
        assert mesh.outputs.requests.empty()


@pytest.mark.parametrize(
    "other",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a+"}}],
    ids=lambda other: next(iter(other)),
)
async def test_a_forced_call_wins_over_another_constraint(socket_dir: Path, other: dict[str, Any]) -> None:
    async with gateway(socket_dir, tool_call_parser="none") as (mesh, http):
        task, request = await asked(mesh, http, tools=TOOLS, tool_choice="required", **other)
        assert "parameters" in request.submit.sampling_params.structured_outputs.json
        request.answer('[{"name": "get_time", "parameters": {}}]')
        response = await task
    assert response.headers["x-tokenloom-ignored"] == next(iter(other))
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_time"


async def test_past_calls_reach_the_template_with_arguments_as_objects(socket_dir: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": [1]}'}},
                {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    async with gateway(socket_dir) as (mesh, http):
        mesh.outputs.auto = ("It is noon.",)
        assert (await post(http, messages=messages, tools=TOOLS)).status_code == 200
        (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    _, assistant, tool = json.loads(chat.messages_json)
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "Hm."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"a": [1]}, {}]
    assert tool == {"role": "tool", "content": "noon", "tool_call_id": "c1"}


async def test_reasoning_is_separated(socket_dir: Path) -> None:
    async with gateway(socket_dir, reasoning_parser="qwen3") as (mesh, http):
        mesh.outputs.auto = ("<thi", "nk>\nHm, ", "hm.\n</think>", "\n\nYes", ".")
        (choice,) = (await post(http)).json()["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "Yes.",
            "reasoning": "Hm, hm.",
            "reasoning_content": "Hm, hm.",
        }
        deltas = [event["choices"][0]["delta"] for event in events(await post(http, stream=True))]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, hm."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        (choice,) = (await post(http, include_reasoning=False)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Yes."}
        for tokenizer in (mesh.tokenizer, mesh.second_tokenizer):
            tokenizer.reasoning_start = types_pb2.REASONING_START_OPEN
        mesh.outputs.auto = ("Hm.</think>Yes.",)
        (choice,) = (await post(http)).json()["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Yes.")
        mesh.outputs.auto = ('{"a": 1}',)
        (choice,) = (await post(http, response_format={"type": "json_object"})).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": '{"a": 1}'}, "constrained: there is none"


@pytest.mark.parametrize(
    ("reasoning", "output", "reason"),
    [
        (types_pb2.REASONING_MODE_FREE, "<think>Hm.", "length"),
        (types_pb2.REASONING_MODE_FREE, '<think>Hm.</think>{"a": 1}', "stop"),
        (types_pb2.REASONING_MODE_UNSPECIFIED, '{"a": 1}', "stop"),  # the constraint covers all of it
    ],
)
async def test_a_constrained_answer_that_ends_within_its_reasoning_is_cut_off(
    socket_dir: Path, reasoning: types_pb2.ReasoningMode, output: str, reason: str
) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = types_pb2.ModelLimits(max_model_len=512, vocab_size=256, reasoning=reasoning)
    async with mesh.gateway(reasoning_parser="qwen3") as mesh, mesh.http() as http:
        mesh.outputs.auto = (output,)
        (choice,) = (await post(http, response_format={"type": "json_object"})).json()["choices"]
        assert choice["finish_reason"] == reason
        (choice,) = (await post(http)).json()["choices"]
        assert choice["finish_reason"] == "stop", "nothing is due after the reasoning"


@pytest.mark.parametrize(
    ("parser", "openings"),
    [
        ("hermes", ["<tool_call>"]),
        ("mistral", ["[TOOL_CALLS]"]),
        ("llama3_json", ["<|python_tag|>", '{"name": "']),
        ("none", []),
    ],
)
async def test_calls_that_are_forbidden_cannot_begin(socket_dir: Path, parser: str, openings: list[str]) -> None:
    async with gateway(socket_dir, tool_call_parser=parser) as (mesh, http):

        async def forbidden(**fields: Any) -> list[str]:
            answer, request = await asked(mesh, http, **fields)
            request.answer("No.")
            await answer
            return [bytes(word.ids).decode() for word in request.submit.sampling_params.bad_words]

        assert await forbidden(tools=TOOLS, tool_choice="none") == openings
        assert [chat.tools_json for chat in mesh.tokenizer.chats + mesh.second_tokenizer.chats] != [b""]
        assert await forbidden(tool_choice="none") == []
        assert await forbidden(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}) == []
        if parser != "none":
            assert await forbidden(tools=TOOLS) == []


async def test_tools_that_may_not_be_called_can_be_left_out(socket_dir: Path) -> None:
    async with gateway(socket_dir, exclude_tools_when_tool_choice_none=True) as (mesh, http):
        answer, request = await asked(mesh, http, tools=TOOLS, tool_choice="none")
        request.answer("No.")
        await answer
        (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
        assert chat.tools_json == b""
        assert not request.submit.sampling_params.bad_words


@pytest.mark.parametrize(
    ("special", "fields", "kept"),
    [
        (["<think>", "</think>"], {}, True),
        (["</think>"], {"skip_special_tokens": True}, True),
        (["<tool_call>"], {}, False),
        (["<tool_call>"], {"tools": TOOLS}, True),
        ([], {"tools": TOOLS}, False),
    ],
)
async def test_marks_that_are_special_tokens_reach_the_parsers(
    socket_dir: Path, special: list[str], fields: dict[str, Any], kept: bool
) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.tokenizer.special_marks = mesh.second_tokenizer.special_marks = special
    async with mesh.gateway(tool_call_parser="hermes", reasoning_parser="qwen3") as mesh, mesh.http() as http:
        answer, request = await asked(mesh, http, **fields)
        request.answer("<think>Hm.</think>Yes.")
        assert (await answer).json()["choices"][0]["message"]["content"] == "Yes."
        text = request.submit.text
        assert (text.HasField("skip_special_tokens") and not text.skip_special_tokens) is kept


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("output", "fields", "reason"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "', {}, "stop"),
        ("".join(CALL) + "\nDone", {}, "tool_calls"),  # the stop string came after the call
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "', {"tool_choice": NAMED}, "stop"),
        ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name"', REQUIRED, "stop"),
    ],
)
async def test_a_call_that_a_stop_string_cuts_off_is_no_complete_one(
    socket_dir: Path, output: str, fields: dict[str, Any], reason: str, stream: bool
) -> None:
    async with gateway(socket_dir) as (mesh, http):
        answer, request = await asked(mesh, http, tools=TOOLS, stop=["Oslo"], stream=stream, **fields)
        request.answer(output, stop_reason="Oslo")
        response = await answer
    choice = events(response)[-1]["choices"][0] if stream else response.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, "Oslo")


async def test_a_call_that_is_cut_before_its_name_is_no_text(socket_dir: Path) -> None:
    async with gateway(socket_dir) as (mesh, http):
        for cut in range(1, len(CALL[1])):
            answer, request = await asked(mesh, http, tools=TOOLS)
            request.answer("I ask.\n", "<tool_call>" + CALL[1][11:cut], reason=types_pb2.FINISH_REASON_LENGTH)
            (choice,) = (await answer).json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": "I ask."}
            assert choice["finish_reason"] == "length"


HALF_NAME = '<tool_call>{"name": "f\\ud83d", "arguments": {"a": 1}}</tool_call>'
HALF_ARGUMENTS = '<tool_call>{"name": "f", "arguments": "\\ud83d"}</tool_call>'
HALF_VALUE = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'


@pytest.mark.parametrize("output", [HALF_NAME, HALF_ARGUMENTS, HALF_VALUE])
async def test_half_a_surrogate_pair_that_the_model_writes_is_replaced_in_every_api(
    socket_dir: Path, output: str
) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    user = [{"role": "user", "content": "hi"}]
    async with gateway(socket_dir) as (mesh, http):
        mesh.outputs.auto = (output,)
        for stream in (False, True):
            for path, body in (
                ("/v1/chat/completions", {"messages": user, "tools": [tool]}),
                ("/v1/messages", {"messages": user, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}]}),
                ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]}),
                ("/api/chat", {"model": MODEL, "messages": user, "tools": [tool]}),
            ):
                response = await http.post(path, json={**body, "stream": stream})
                assert response.status_code == 200, response.text
                assert "internal" not in response.text
