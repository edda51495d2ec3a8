"""Requests as the clients send them."""

import json
from typing import Any

import pytest

from tokenloom.bench.load.agent_bodies import AgentRequest, request_of
from tokenloom.bench.load.agent_sessions import AgentClient, Line, Message, Role, ToolCall, Turn

TOOL = {"name": "run", "description": "Runs a command.", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = '{"command": "ls"}'
LINE = Line("session-1", "", "Instructions.", (TOOL,), "About the project.")
SUB = Line("session-2", "session-1", "Instructions of a sub-agent.", (TOOL,), "")
HISTORY = (
    Message(Role.USER, "Look."),
    Message(Role.ASSISTANT, "I look.", (ToolCall("call_1", "run", ARGUMENTS), ToolCall("call_2", "run", "{}"))),
    Message(Role.TOOL, "a file", answers="call_1"),
    Message(Role.TOOL, "nothing", answers="call_2"),
    Message(Role.ASSISTANT, "There is a file."),
    Message(Role.USER, "Good."),
)


def request(client: AgentClient, line: Line = LINE, messages: tuple[Message, ...] = HISTORY) -> AgentRequest:
    made = request_of(client, "m", line, Turn(messages, 1.0, 50), 7)
    assert made.body["model"] == "m"
    assert made.body["stream"] is True
    return made


def texts(content: list[dict[str, Any]]) -> list[str]:
    return [block["text"] for block in content if block["type"] == "text"]


def test_claude_code_sends_messages() -> None:
    made = request(AgentClient.CLAUDE_CODE)
    assert (made.path, made.headers["x-app"]) == ("/v1/messages?beta=true", "cli")
    body = made.body
    assert [turn["role"] for turn in body["messages"]] == ["user", "system", "assistant", "user", "assistant", "user"]
    assert "About the project." in texts(body["messages"][0]["content"])[0]
    calls = body["messages"][2]["content"]
    assert [(block["id"], block["input"]) for block in calls[1:]] == [("call_1", {"command": "ls"}), ("call_2", {})]
    results = body["messages"][3]["content"]
    assert [(block["tool_use_id"], block["content"]) for block in results] == [
        ("call_1", "a file"),
        ("call_2", "nothing"),
    ]
    assert body["tools"][0]["input_schema"] == TOOL["parameters"]
    assert (
        json.loads(body["metadata"]["user_id"])["session_id"] == made.headers["X-Claude-Code-Session-Id"] == "session-1"
    )
    assert body["max_tokens"] == 7


def test_claude_code_marks_the_last_block_for_the_cache() -> None:
    *before, last = request(AgentClient.CLAUDE_CODE).body["messages"]
    assert last["content"][-1]["cache_control"] == {"type": "ephemeral"}
    assert "cache_control" not in json.dumps(before)


def test_claude_codes_first_line_changes_with_every_request() -> None:
    first, second = (
        request(AgentClient.CLAUDE_CODE, messages=messages).body["system"] for messages in (HISTORY, HISTORY[:1])
    )
    assert first[0]["text"].startswith("x-anthropic-billing-header: ")
    assert first[0] != second[0]
    assert first[1:] == second[1:]


def test_a_sub_agent_of_claude_code_has_its_sessions_id() -> None:
    made = request(AgentClient.CLAUDE_CODE, SUB, HISTORY[:1])
    assert made.headers["X-Claude-Code-Session-Id"] == "session-1"
    assert [turn["role"] for turn in made.body["messages"]] == ["user"]


def test_codex_sends_a_response_without_state() -> None:
    made = request(AgentClient.CODEX)
    body = made.body
    assert (made.path, made.headers["session_id"], body["prompt_cache_key"]) == (
        "/v1/responses",
        "session-1",
        "session-1",
    )
    assert (body["store"], body["instructions"], body["max_output_tokens"]) == (False, "Instructions.", 7)
    kinds = [item["type"] for item in body["input"]]
    calls = ["function_call"] * 2 + ["function_call_output"] * 2
    assert kinds == ["message"] * 4 + calls + ["message"] * 2
    assert [item["role"] for item in body["input"][:4]] == ["developer", "user", "user", "assistant"]
    assert body["input"][4]["arguments"] == ARGUMENTS
    assert [item["call_id"] for item in body["input"][4:8]] == ["call_1", "call_2"] * 2
    assert body["tools"] == [{"type": "function", **TOOL, "strict": False}]


def test_opencode_sends_a_chat_and_names_its_session_in_headers() -> None:
    made = request(AgentClient.OPENCODE)
    assert made.path == "/v1/chat/completions"
    assert made.headers["x-session-affinity"] == made.headers["X-Session-Id"] == "session-1"
    body = made.body
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message["role"] for message in body["messages"]] == roles
    assert [call["id"] for call in body["messages"][2]["tool_calls"]] == ["call_1", "call_2"]
    assert [message["tool_call_id"] for message in body["messages"][3:5]] == ["call_1", "call_2"]
    assert "About the project." in body["messages"][0]["content"]
    assert body["stream_options"] == {"include_usage": True}
    assert request(AgentClient.OPENCODE, SUB).headers["x-parent-session-id"] == "session-1"


@pytest.mark.parametrize("client", AgentClient)
def test_a_later_request_begins_as_the_one_before(client: AgentClient) -> None:
    key = "input" if client is AgentClient.CODEX else "messages"
    first, second = (request(client, messages=messages).body[key] for messages in (HISTORY[:4], HISTORY))
    plain = [json.dumps(each).replace(', "cache_control": {"type": "ephemeral"}', "") for each in (*first, *second)]
    assert plain[: len(first)] == plain[len(first) : 2 * len(first)]
