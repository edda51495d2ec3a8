"""Anthropic's Messages API over HTTP, also as Anthropic's client reads it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.services.gateway.fakes import BLOCK_SIZE, LIMITS, MODEL, FakeMesh
from tokenloom.request import errors
from tokenloom.v1 import types_pb2

if TYPE_CHECKING:
    import anthropic

BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "get_weather", "description": "It.", "input_schema": SCHEMA}]
CALL = ("I ask.\n", '<tool_call>\n{"name": "get_', 'weather", "arguments": {"city"', ': "Oslo"}}\n</tool_call>')


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/messages?beta=true", json={**BODY, **fields})


def last_chat(mesh: FakeMesh) -> Any:
    """The conversation that a tokenizer was given."""
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    return json.loads(chat.messages_json)


@asynccontextmanager
async def claude(directory: Path, **settings: Any) -> "AsyncIterator[tuple[FakeMesh, anthropic.AsyncAnthropic]]":
    """Anthropic's client of a gateway that reads Hermes' tool calls."""
    import anthropic  # a second, which only the process that runs these tests need wait

    async with FakeMesh(directory).gateway(**{"tool_call_parser": "hermes", **settings}) as mesh:
        url = f"http://{mesh.http_address}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="a key", max_retries=0) as client:
            yield mesh, client


async def test_a_whole_answer(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hel", "lo"]
    response = await post(http, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    message = response.json()
    assert response.status_code == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert message.pop("id").startswith("msg_")
    usage = message["usage"]
    assert usage.pop("cache_miss")["cause"] == "new_prefix"
    in_blocks = (usage["input_tokens"] + usage["cache_creation_input_tokens"] + 1) // BLOCK_SIZE * BLOCK_SIZE
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["input_tokens"],
            "cache_creation_input_tokens": in_blocks - 1,
            "cache_creation": {"ephemeral_5m_input_tokens": in_blocks - 1, "ephemeral_1h_input_tokens": 0},
            "cache_read_input_tokens": 1,
            "output_tokens": 5,
        },
    }
    assert last_chat(mesh) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


MARK = {"type": "ephemeral"}
HOUR = {**MARK, "ttl": "1h"}
TWO = [{"type": "text", "text": text} for text in ("Be brief.", "And kind.")]


@pytest.mark.parametrize(
    ("fields", "seconds", "times"),
    [
        ({}, 0, None),
        ({"cache_control": MARK}, 300, {"5m": 1, "1h": 0}),
        ({"system": [TWO[0] | {"cache_control": HOUR}, TWO[1]]}, 3600, {"5m": 0, "1h": 1}),
        ({"system": [TWO[0] | {"cache_control": HOUR}, TWO[1] | {"cache_control": MARK}]}, 3600, None),
        ({"tools": [TOOLS[0] | {"cache_control": MARK}]}, 300, {"5m": 1, "1h": 0}),
    ],
)
async def test_marks_say_for_how_long_the_prompt_is_kept(
    socket_dir: Path, fields: dict[str, Any], seconds: int, times: dict[str, int] | None
) -> None:
    async with claude(socket_dir) as (mesh, client):
        mesh.outputs.auto = ["x"]
        messages: Any = [{"role": "user", "content": "x" * 2 * BLOCK_SIZE}]
        body: Any = {**BODY, "messages": messages} | fields
        usage = (await client.messages.create(**body)).usage
        async with client.messages.stream(**body) as stream:
            assert (await stream.get_final_message()).usage.cache_read_input_tokens == 1
    requests = [request for session in mesh.outputs.sessions for request in session.requests.values()]
    assert {request.submit.keep_seconds for request in requests} == {seconds}
    written = usage.cache_creation_input_tokens
    assert bool(written) == bool(seconds)
    found = usage.cache_creation
    assert (found is None) == (times is None)
    if found is not None and times is not None:
        assert (found.ephemeral_5m_input_tokens, found.ephemeral_1h_input_tokens) == tuple(
            times[each] * (written or 0) for each in ("5m", "1h")
        )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cache_control": {"type": "forever"}}, "cache_control"),
        ({"cache_control": {**MARK, "ttl": "2h"}}, "cache_control.ttl"),
        ({"system": [TWO[0] | {"cache_control": 3}]}, "system[0].cache_control"),
        ({"system": [TWO[0] | {"cache_control": MARK}] * 5}, "system[4].cache_control"),
        (
            {"messages": [{"role": "user", "content": [TWO[0] | {"cache_control": {**MARK, "ttl": 5}}]}]},
            "messages[0].content[0].cache_control.ttl",
        ),
    ],
)
async def test_malformed_marks_are_refused_by_name(http: httpx.AsyncClient, fields: dict[str, Any], named: str) -> None:
    response = await post(http, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(named), response.text


async def test_sampling_and_stop_sequences_reach_the_engine(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, temperature=0.5, top_k=3, stop_sequences=["END"], seed=4))
    request = await mesh.outputs.next_request()
    params = request.submit.sampling_params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 3, 64, 4)
    assert list(request.submit.text.stop) == ["END"]
    request.answer("x", stop_reason="END")
    message = (await task).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_max_tokens_may_exceed_what_the_prompt_leaves(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, max_tokens=32_000))
    request = await mesh.outputs.next_request()
    left = LIMITS.max_model_len - len(request.submit.prompt.token_ids)
    assert request.submit.sampling_params.max_tokens == left > 64
    request.answer("x")
    assert (await task).status_code == 200


async def test_the_model_continues_what_the_client_began(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    assert (await post(http, messages=turns)).status_code == 200
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    assert chat.continue_final_message


async def test_the_end_at_max_tokens(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http))
    (await mesh.outputs.next_request()).answer("x", reason=types_pb2.FINISH_REASON_LENGTH)
    assert (await task).json()["stop_reason"] == "max_tokens"


async def test_an_answer_that_an_operator_ended_is_not_called_complete(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http))
    (await mesh.outputs.next_request()).answer("Well", reason=types_pb2.FINISH_REASON_ABORT)
    message = (await task).json()
    assert (message["stop_reason"], message["content"][0]["text"]) == ("pause_turn", "Well")


async def test_text_after_a_call_in_the_same_piece_keeps_its_place(socket_dir: Path) -> None:
    async with claude(socket_dir) as (mesh, client):
        mesh.outputs.auto = ('<tool_call>{"name": "get_weather", "arguments": {"city": ', '"Oslo"}}</tool_call>So.')
        whole = await client.messages.create(**BODY, tools=TOOLS)
        async with client.messages.stream(**BODY, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        call, text = message.content
        assert call.type == "tool_use"
        assert text.type == "text"
        assert (call.input, text.text) == ({"city": "Oslo"}, "So.")


async def test_both_usages_of_a_stream_count_the_whole_prompt(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    lines = (await post(http, stream=True)).text.splitlines()
    events = {event["type"]: event for line in lines if line.startswith("data: ") for event in [json.loads(line[6:])]}
    first, last = events["message_start"]["message"]["usage"], events["message_delta"]["usage"]
    assert first.keys() == last.keys()
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(first[name] for name in names) == sum(last[name] for name in names) > 1
    assert last["cache_read_input_tokens"] == 1


async def test_a_stream_with_a_call_as_anthropics_client_reads_it(socket_dir: Path) -> None:
    async with claude(socket_dir) as (mesh, client):
        mesh.outputs.auto = CALL
        async with client.messages.stream(**BODY, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
    text, call = message.content
    assert text.type == "text"
    assert call.type == "tool_use"
    assert text.text == "I ask."
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    assert message.usage.cache_read_input_tokens == 1
    assert message.usage.output_tokens == BODY["max_tokens"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_line_break_in_arguments_does_not_empty_the_input(socket_dir: Path, streamed: bool) -> None:
    async with claude(socket_dir) as (mesh, client):
        mesh.outputs.auto = ['<tool_call>{"name": "get_weather", "arguments": {"city": "Os', '\nlo"}}</tool_call>']
        asked: Any = {**BODY, "tools": TOOLS}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.input == {"city": "Os\nlo"}


@pytest.mark.parametrize(("text", "end"), [('["Oslo"]', "}</tool_call>"), ('{"city": "Os', "")])
async def test_arguments_that_cannot_be_read_are_no_empty_input(socket_dir: Path, text: str, end: str) -> None:
    """The second model ends its turn within a call, and the stop reason is that of a whole one."""
    async with claude(socket_dir) as (mesh, client):
        mesh.outputs.auto = [f'<tool_call>{{"name": "get_weather", "arguments": {text}{end}']
        message = await client.messages.create(**BODY, tools=TOOLS)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.input == {"INVALID_JSON": text}


async def test_a_tools_result_returns_to_the_model(socket_dir: Path) -> None:
    async with claude(socket_dir) as (mesh, client):
        mesh.outputs.auto = CALL
        question: dict[str, Any] = {"role": "user", "content": "The weather?"}
        answer = await client.messages.create(**{**BODY, "messages": [question]}, tools=TOOLS)
        call = answer.content[-1]
        assert call.type == "tool_use"
        mesh.tokenizer.chats.clear()
        mesh.second_tokenizer.chats.clear()
        mesh.outputs.auto = ("It rains.",)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
        turns: list[Any] = [
            question,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        last = await client.messages.create(**{**BODY, "messages": turns}, tools=TOOLS)
        assert last.content[0].to_dict() == {"type": "text", "text": "It rains."}
        function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
        assert last_chat(mesh)[1:] == [
            {
                "role": "assistant",
                "content": "I ask.",
                "tool_calls": [{"type": "function", "function": function, "id": call.id}],
            },
            {"role": "tool", "content": "rain", "tool_call_id": call.id},
            {"role": "user", "content": "So?"},
        ]


@pytest.mark.parametrize(
    ("blocks", "turn"),
    [
        ([], {"content": ""}),
        ([{"type": "thinking", "thinking": "Hm.", "signature": ""}], {"content": "", "reasoning_content": "Hm."}),
        ([{"type": "text", "text": "I "}, {"type": "text", "text": "ask."}], {"content": "I ask."}),
        *(
            ([{"type": "tool_use", "id": "c", "name": "f", "input": given}], {"content": "", "tool_calls": [expected]})
            for given, expected in (({}, {}), (None, {}), ('{"a": "Par', '{"a": "Par'), ([], "[]"))
        ),
    ],
)
async def test_any_answer_is_accepted_as_history(
    mesh: FakeMesh, http: httpx.AsyncClient, blocks: list[Any], turn: dict[str, Any]
) -> None:
    mesh.outputs.auto = ["x"]
    question = {"role": "user", "content": "hi"}
    for turn_after in ([question], []):
        mesh.tokenizer.chats.clear()
        mesh.second_tokenizer.chats.clear()
        answer = await post(http, messages=[question, {"role": "assistant", "content": blocks}, *turn_after])
        assert answer.status_code == 200, answer.text
        written = last_chat(mesh)[1]
        if calls := written.pop("tool_calls", None):
            written["tool_calls"] = [call["function"]["arguments"] for call in calls]
        assert written == {"role": "assistant", **turn}


async def test_a_turn_of_the_assistant_may_have_no_content(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    question = {"role": "user", "content": "hi"}
    answer = await post(http, messages=[question, {"role": "assistant"}, question])
    assert answer.status_code == 200, answer.text
    assert last_chat(mesh)[1] == {"role": "assistant", "content": ""}


async def test_thinking_is_returned_when_it_is_asked_for(socket_dir: Path) -> None:
    async with claude(socket_dir, reasoning_parser="qwen3") as (mesh, client):
        mesh.outputs.auto = ("<think>Hm.</think>", "Yes.")
        silent = await client.messages.create(**BODY)
        assert [block.type for block in silent.content] == ["text"]
        message = await client.messages.create(**BODY, thinking={"type": "adaptive"})
        thought, text = message.content
        assert thought.type == "thinking"
        assert text.type == "text"
        assert (thought.thinking, text.text) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("choice", "constrained"), [({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True), (None, False)]
)
async def test_a_forced_call_is_decoded_under_its_schema(
    socket_dir: Path, choice: dict[str, str] | None, constrained: bool
) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        task = asyncio.create_task(post(http, tools=TOOLS, tool_choice=choice))
        request = await mesh.outputs.next_request()
        assert request.submit.sampling_params.HasField("structured_outputs") == constrained
        request.answer("x")
        await task


async def test_an_output_format_constrains_the_answer(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    task = asyncio.create_task(post(http, output_config={"format": form}))
    request = await mesh.outputs.next_request()
    assert json.loads(request.submit.sampling_params.structured_outputs.json) == SCHEMA
    request.answer('{"city":"Oslo"}')
    assert (await task).json()["content"] == [{"type": "text", "text": '{"city":"Oslo"}'}]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_a_wrong_body_is_refused_in_anthropics_form(
    http: httpx.AsyncClient, fields: dict[str, Any], where: str
) -> None:
    response = await post(http, **fields)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert response.headers["request-id"]
    assert where in error["error"]["message"]


async def test_a_stream_that_fails_ends_with_an_error_event(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    asking = http.stream("POST", "/v1/messages", json=BODY | {"stream": True})
    is_read = asyncio.Event()

    async def send_and_fail() -> None:
        request = await mesh.outputs.next_request()
        request.send("Hel", [1, 2, 3])
        await is_read.wait()
        request.fail(errors.Unavailable("the engine is away"))

    sending = asyncio.create_task(send_and_fail())
    async with asking as response:
        lines = response.aiter_lines()
        async for line in lines:
            if "Hel" in line:
                is_read.set()
                break
        *_, name, data, _ = [line async for line in lines]
    await sending
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


async def test_a_key_in_anthropics_header(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("a key",)) as mesh, mesh.http() as http:
        mesh.outputs.auto = ("yes",)
        refused = await post(http)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        http.headers["x-api-key"] = "a key"
        assert (await post(http)).status_code == 200


async def test_count_tokens(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {name: BODY[name] for name in ("model", "messages")} | {"system": "Be brief.", "tools": TOOLS}
    response = await http.post("/v1/messages/count_tokens", json=body)
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    assert response.json() == {"input_tokens": len(chat.messages_json)}
    assert json.loads(chat.tools_json)[0]["function"]["name"] == "get_weather"


async def test_clients_learn_that_a_server_is_there(http: httpx.AsyncClient) -> None:
    response = await http.head("/")
    assert response.status_code == 200
    assert MODEL in (await http.get("/")).text
