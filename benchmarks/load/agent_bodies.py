"""Makes the requests of Claude Code, Codex and OpenCode, as these clients send them.

The members, their order and the headers are those that Claude Code sent to a server that recorded them, and those that
the sources of Codex and OpenCode name. Only the largest number of output tokens differs: the answer of a model that is
not trained has no other end.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .agent_sessions import AgentClient, Line, Message, Role, Turn

_EPHEMERAL = {"type": "ephemeral"}


@dataclass(frozen=True)
class AgentRequest:
    """Holds what is posted."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def request_of(client: AgentClient, model: str, line: Line, turn: Turn, max_tokens: int) -> AgentRequest:
    """Return a turn's request. ``max_tokens``: at which token the answer ends."""
    return _MAKERS[client](model, line, turn, max_tokens)


def _claude_code(model: str, line: Line, turn: Turn, max_tokens: int) -> AgentRequest:
    session = line.parent or line.name  # a sub-agent has its session's id
    user = json.dumps({"device_id": hashlib.sha256(b"device").hexdigest(), "account_uuid": "", "session_id": session})
    body = {
        "model": model,
        "messages": _anthropic_messages(line, turn.messages),
        "system": [
            {"type": "text", "text": _billing_line(line, turn)},
            {"type": "text", "text": "You are an agent for code.", "cache_control": _EPHEMERAL},
            {"type": "text", "text": line.instructions, "cache_control": _EPHEMERAL},
        ],
        "tools": [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in line.tools
        ],
        "metadata": {"user_id": user},
        "max_tokens": max_tokens,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {
        "User-Agent": "claude-cli/2.1.330 (external, cli)",
        "X-Claude-Code-Session-Id": session,
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "anthropic-version": "2023-06-01",
        "x-api-key": "none",
        "x-app": "cli",
    }
    return AgentRequest("/v1/messages?beta=true", headers, body)


def _billing_line(line: Line, turn: Turn) -> str:
    """Return the line whose mark changes with every request."""
    mark = hashlib.sha256(f"{line.name}/{len(turn.messages)}/{turn.messages[-1].text}".encode()).hexdigest()[:5]
    return f"x-anthropic-billing-header: cc_version=2.1.330.0df; cc_entrypoint=cli; cch={mark};"


def _anthropic_messages(line: Line, messages: Iterable[Message]) -> list[dict[str, Any]]:
    first, *rest = messages
    begin: list[dict[str, Any]] = [{"type": "text", "text": first.text}]
    if not line.project:
        turns = [{"role": "user", "content": begin}]
    else:
        reminder = f"<system-reminder>\n{line.project}\n</system-reminder>\n"
        turns = [
            {"role": "user", "content": [{"type": "text", "text": reminder}, *begin]},
            {"role": "system", "content": [{"type": "text", "text": "# Environment\n - Platform: linux\n"}]},
        ]
    for message in rest:
        block: dict[str, Any] = {"type": "text", "text": message.text}
        if message.role is Role.TOOL:
            result = {"tool_use_id": message.answers, "type": "tool_result", "content": message.text}
            block = result | {"is_error": False}
        role = "assistant" if message.role is Role.ASSISTANT else "user"
        # Results of calls that were made together are parts of one turn, as are the calls.
        content = turns[-1]["content"] if turns[-1]["role"] == role else []
        if not content:
            turns.append({"role": role, "content": content})
        assert isinstance(content, list)
        content.append(block)
        for call in message.calls:
            use = {"type": "tool_use", "id": call.call_id, "name": call.tool}
            content.append(use | {"input": json.loads(call.arguments)})
    last = turns[-1]["content"]
    assert isinstance(last, list)
    last[-1] = last[-1] | {"cache_control": _EPHEMERAL}
    return turns


def _codex(model: str, line: Line, turn: Turn, max_tokens: int) -> AgentRequest:
    body = {
        "model": model,
        "instructions": line.instructions,
        "input": [*_codex_context(line), *(item for message in turn.messages for item in _codex_items(message))],
        "tools": [{"type": "function", **tool, "strict": False} for tool in line.tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": line.name,
        "max_output_tokens": max_tokens,
    }
    headers = {
        "User-Agent": "codex_cli_rs/0.169.0 (Linux; x86_64)",
        "originator": "codex_cli_rs",
        "session_id": line.name,
        "Authorization": "Bearer none",
    }
    return AgentRequest("/v1/responses", headers, body)


def _codex_context(line: Line) -> list[dict[str, Any]]:
    permissions = "<permissions instructions>\nCommands run in a sandbox.\n</permissions instructions>"
    context = [_codex_message("developer", "input_text", permissions)]
    if line.project:
        text = f"# AGENTS.md instructions\n\n<INSTRUCTIONS>\n{line.project}\n</INSTRUCTIONS>"
        context.append(_codex_message("user", "input_text", text))
    return context


def _codex_items(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        return [{"type": "function_call_output", "call_id": message.answers, "output": message.text}]
    if message.role is Role.USER:
        return [_codex_message("user", "input_text", message.text)]
    calls = [
        {"type": "function_call", "name": call.tool, "arguments": call.arguments, "call_id": call.call_id}
        for call in message.calls
    ]
    return [_codex_message("assistant", "output_text", message.text), *calls]


def _codex_message(role: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _opencode(model: str, line: Line, turn: Turn, max_tokens: int) -> AgentRequest:
    system = "\n".join(filter(None, (line.instructions, "<env>\n  Platform: linux\n</env>", line.project)))
    body = {
        "model": model,
        "max_tokens": max_tokens,
        "messages": [{"role": "system", "content": system}, *map(_chat_message, turn.messages)],
        "tools": [{"type": "function", "function": tool} for tool in line.tools],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {
        "User-Agent": "opencode/1.1.0",
        "x-session-affinity": line.name,
        "X-Session-Id": line.name,
        "Authorization": "Bearer none",
    }
    if line.parent:
        headers["x-parent-session-id"] = line.parent
    return AgentRequest("/v1/chat/completions", headers, body)


def _chat_message(message: Message) -> dict[str, Any]:
    if message.role is Role.TOOL:
        return {"role": "tool", "tool_call_id": message.answers, "content": message.text}
    said: dict[str, Any] = {"role": str(message.role), "content": message.text}
    if message.calls:
        said["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.tool, "arguments": call.arguments}}
            for call in message.calls
        ]
    return said


_MAKERS = {
    AgentClient.CLAUDE_CODE: _claude_code,
    AgentClient.CODEX: _codex,
    AgentClient.OPENCODE: _opencode,
}
