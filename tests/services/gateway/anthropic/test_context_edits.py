"""``context_management`` and ``diagnostics`` of Anthropic's API, with bodies as Claude Code sends them."""

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest

from tests.services.gateway.anthropic.test_messages import post
from tests.services.gateway.fakes import FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.anthropic.context_edits import (
    CLEARED,
    MOST_EDITS,
    ContextEdits,
    ignored_edits,
    read_edits,
)
from tokenloom.services.gateway.anthropic.message_answer import MessageReports
from tokenloom.services.gateway.generation.open_turn import OpenTurn
from tokenloom.services.gateway.generation.past_turns import ChatDigest, PastMessage, PastTurn
from tokenloom.services.gateway.openai.chat import read_chat
from tokenloom.services.gateway.records.generate_request import Chat
from tokenloom.v1.inference_pb2 import MissCause
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt


def turns(number: int) -> list[dict[str, Any]]:
    """A conversation with so many uses of tools, of two tools in turn, and reasoning before each."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    for index in range(number):
        function = {"name": ("Bash", "Read")[index % 2], "arguments": {"n": index}}
        call = {"id": f"call_{index}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "reasoning_content": f"Thought {index}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{index}", "content": f"result {index} " + "x" * 80},
        ]
    return messages


async def encode(chat: Chat) -> TokenizedPrompt:
    """A byte is a token."""
    return TokenizedPrompt(token_ids=chat.messages_json)


async def edited(number: int, *edits: dict[str, Any]) -> tuple[list[dict[str, Any]], ContextEdits]:
    chat = read_chat(turns(number))
    found = read_edits({"edits": edits})
    assert found is not None
    after, prompt = await found.run(chat, encode)
    assert bytes(prompt.token_ids) == after.messages_json
    assert found.num_tokens == len(chat.messages_json)
    saved = sum(each["cleared_input_tokens"] for each in found.applied)  # type: ignore[misc]
    assert found.num_tokens - len(prompt.token_ids) == saved
    return json.loads(after.messages_json), found


def results(messages: list[dict[str, Any]]) -> list[bool]:
    """Whether each result was cleared."""
    return [message["content"] == CLEARED for message in messages if message["role"] == "tool"]


TOOL_USES = {"type": "clear_tool_uses_20250919"}
FEW = {**TOOL_USES, "trigger": {"type": "input_tokens", "value": 100}}


async def test_old_results_of_tools_are_cleared_beyond_the_trigger() -> None:
    messages, edits = await edited(5, FEW)
    assert results(messages) == [True, True, False, False, False]
    (applied,) = edits.applied
    assert (applied["type"], applied["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 2)
    assert [message for message in messages if message["role"] != "tool"] == [
        message for message in json.loads(read_chat(turns(5)).messages_json) if message["role"] != "tool"
    ]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (TOOL_USES, [False] * 5),  # far below 100,000 tokens
        ({**FEW, "keep": {"type": "tool_uses", "value": 0}}, [True] * 5),
        ({**FEW, "keep": {"type": "tool_uses", "value": 9}}, [False] * 5),
        (
            {**FEW, "keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["Read"]},
            [True, False, True, False, False],
        ),
        ({**FEW, "clear_at_least": {"type": "input_tokens", "value": 10_000}}, [False] * 5),
        ({**TOOL_USES, "trigger": {"type": "tool_uses", "value": 4}}, [True, True, False, False, False]),
        ({**TOOL_USES, "trigger": {"type": "tool_uses", "value": 5}}, [False] * 5),
    ],
)
async def test_which_results_are_cleared(edit: dict[str, Any], expected: list[bool]) -> None:
    messages, edits = await edited(5, edit)
    assert results(messages) == expected
    assert len(edits.applied) == any(expected)


@pytest.mark.parametrize(
    ("inputs", "expected"), [(True, [{}, {}]), (["Read"], [{"n": 0}, {}]), (None, [{"n": 0}, {"n": 1}])]
)
async def test_arguments_are_cleared_where_the_client_asks(inputs: Any, expected: list[Any]) -> None:
    messages, _ = await edited(5, {**FEW, "clear_tool_inputs": inputs})
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls[:2]] == expected


@pytest.mark.parametrize(
    ("keep", "expected"),
    [({"type": "thinking_turns", "value": 2}, 2), ("all", 4), ({"type": "all"}, 4), (None, 1)],
)
async def test_old_reasoning_is_cleared(keep: Any, expected: int) -> None:
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    messages, edits = await edited(4, edit)
    thoughts = ["reasoning_content" in message for message in messages if message["role"] == "assistant"]
    assert thoughts == [False] * (4 - expected) + [True] * expected
    assert [each["cleared_thinking_turns"] for each in edits.applied] == ([4 - expected] if expected < 4 else [])


async def test_edits_are_applied_in_order_and_once() -> None:
    _, edits = await edited(5, {"type": "clear_thinking_20251015"}, FEW, FEW)
    assert [each["type"] for each in edits.applied] == ["clear_thinking_20251015", "clear_tool_uses_20250919"]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (3, "context_management.edits"),
        ({"edits": {}}, "context_management.edits"),
        ({"edits": ["x"]}, "context_management.edits"),
        ({"edits": [{"type": "other"}]}, "context_management.edits[0].type"),
        ({"edits": [{**TOOL_USES, "keep": 3}]}, "context_management.edits[0].keep"),
        ({"edits": [{**TOOL_USES, "trigger": {"type": "x", "value": 1}}]}, "context_management.edits[0].trigger"),
        ({"edits": [{**FEW, "keep": {"type": "tool_uses", "value": -1}}]}, "context_management.edits[0].keep.value"),
        ({"edits": [{**TOOL_USES, "exclude_tools": "Bash"}]}, "context_management.edits[0].exclude_tools"),
        ({"edits": [TOOL_USES] * (MOST_EDITS + 1)}, "context_management.edits"),
    ],
)
def test_what_is_malformed_is_refused_by_name(value: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read_edits(value)
    assert raised.value.field == field


def test_compaction_is_left_to_the_client() -> None:
    value = {"edits": [{"type": "compact_20260112"}]}
    assert read_edits(value) == ContextEdits([])
    assert list(ignored_edits(value)) == ["context_management.edits[].compact_20260112"]
    assert read_edits(None) is None


def used(number: int) -> list[dict[str, Any]]:
    """The same as blocks."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    for index in range(number):
        use = {"type": "tool_use", "id": f"toolu_{index}", "name": "get_weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{index}", "content": "x" * 60}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return messages


EDITS = {"edits": [{**FEW, "keep": {"type": "tool_uses", "value": 0}}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_was_cleared(mesh: FakeMesh, http: httpx.AsyncClient, stream: bool) -> None:
    mesh.tokenizer.tool_call_parser = "hermes"
    mesh.outputs.auto = ["ok"]
    fields = {"messages": used(1), "context_management": EDITS, "stream": stream}
    response = await post(http, **fields)
    assert response.status_code == 200, response.text
    assert "x-tokenloom-ignored" not in response.headers
    if stream:
        (line,) = [line for line in response.text.splitlines() if '"message_delta"' in line and line.startswith("data")]
        answer = json.loads(line[6:])
    else:
        answer = response.json()
    (applied,) = answer["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 1
    request = next(iter(mesh.outputs.sessions[-1].requests.values()))
    prompt = bytes(request.submit.prompt.token_ids).decode()
    assert CLEARED in prompt
    assert "x" * 60 not in prompt


async def test_counted_tokens_are_those_after_the_edits(http: httpx.AsyncClient) -> None:
    body = {"messages": used(2), "context_management": EDITS}
    plain = (await http.post("/v1/messages/count_tokens", json={"messages": used(2)})).json()["input_tokens"]
    counted = (await http.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["context_management"] == {"original_input_tokens": plain}
    assert counted["input_tokens"] < plain


async def diagnosed(http: httpx.AsyncClient, previous: str | None, **fields: Any) -> Any:
    body = {"diagnostics": {"previous_message_id": previous}, **fields}
    response = await post(http, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_diagnostics_say_what_differs_from_the_message_that_is_named(socket_dir: Any) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        mesh.outputs.auto = ["Hello"]
        messages = [{"role": "user", "content": "hi"}]
        first = await diagnosed(http, None, system="Be brief.", messages=messages)
        assert first["diagnostics"] is None
        for changed, expected in (
            ({"system": "Be long."}, "system_changed"),
            ({"messages": [{"role": "user", "content": "ho"}]}, "messages_changed"),
        ):
            body = {"system": "Be brief.", "messages": messages} | copy.deepcopy(changed)
            answer = await diagnosed(http, first["id"], **body)  # type: ignore[arg-type]
            reason = answer["diagnostics"]["cache_miss_reason"]
            assert (reason["type"], reason["cache_missed_input_tokens"] >= 0) == (expected, True)
        same = await diagnosed(http, first["id"], system="Be brief.", messages=messages)
        assert same["diagnostics"] is None
        unknown = await diagnosed(http, "msg_none", system="Be brief.", messages=messages)
        assert unknown["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
        assert "diagnostics" not in (await post(http, messages=messages)).json()


@pytest.mark.parametrize(
    ("cause", "expected"),
    [("TOOLS_CHANGED", "tools_changed"), ("ADAPTER_CHANGED", "model_changed"), ("SALT_CHANGED", "unavailable")],
)
def test_the_words_of_the_api(cause: str, expected: str) -> None:
    chat = ChatDigest((PastMessage("user", b"1"),), b"", b"")
    keys: dict[str, Any] = {"chat": chat, "hashes": (), "salt": b"", "adapter": b"", "opens_reasoning": False}
    before = PastTurn(answer="a", tokens=b"", num_prompt=0, spans=(), engine="", num_reasoning=0, **keys)
    turn = OpenTurn(tokens=b"1234" * 8, block_size=4, before=before, potential=8, **keys)
    turn.cause = MissCause.Value(f"MISS_CAUSE_{cause}")
    reason = MessageReports(previous="a").diagnostics(turn)["diagnostics"]["cache_miss_reason"]  # type: ignore[index]
    assert reason == {"type": expected} | ({} if expected == "unavailable" else {"cache_missed_input_tokens": 8})
    assert MessageReports(previous="a").diagnostics(None) == {
        "diagnostics": {"cache_miss_reason": {"type": "unavailable"}}
    }


async def test_a_malformed_id_is_refused(http: httpx.AsyncClient) -> None:
    response = await post(http, diagnostics={"previous_message_id": 3})
    assert response.status_code == 400
    assert "diagnostics.previous_message_id" in response.json()["error"]["message"]


async def test_a_large_conversation_lets_other_tasks_run() -> None:
    messages = turns(40)
    for message in messages:
        message["content"] += "y" * 50_000
    edits = read_edits({"edits": [FEW, {"type": "clear_thinking_20251015"}]})
    assert edits is not None
    num_turns, edited = 0, asyncio.create_task(edits.run(read_chat(messages), encode))
    while not edited.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 8, "4 MB are read in slices"
    assert [each["type"] for each in edits.applied] == ["clear_tool_uses_20250919", "clear_thinking_20251015"]
    assert results(json.loads(edited.result()[0].messages_json)) == [True] * 37 + [False] * 3
