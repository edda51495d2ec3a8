"""Requests in the shape of coding agents', turn by turn, with texts of our own."""

from collections.abc import Mapping, Sequence
from typing import Any

CLAUDE_CODE = {
    "user-agent": "claude-cli/2.1.330 (external, sdk-cli)",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
}
"""Headers of Claude Code 2.1.330."""
BASH = {
    "name": "Bash",
    "description": "Runs a command in a shell and returns what it writes.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "description": {"type": "string"}},
        "required": ["command"],
    },
}


def rules(number: int) -> str:
    """Instructions of so many sentences, about 22 tokens each."""
    return "\n".join(
        f"- Rule {index}: change only the files that the task names, and say in one sentence what was changed and why."
        for index in range(number)
    )


def claude_body(
    model: str, turns: Sequence[Mapping[str, Any]], turn: int, *, num_rules: int = 40, **fields: Any
) -> dict[str, Any]:
    """What Claude Code sends in a turn: the billing line of its versions with ``cch``, its own name, instructions, the
    environment as a system turn within the conversation, and the conversation so far. ``turns``: after the task."""
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={turn * 7919 % 0xFFFFF:05x};"
    return {
        "model": model,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent for software.", **cached},
            {"type": "text", "text": rules(num_rules), **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Make the file made.txt."}]},
            {"role": "system", "content": "# Environment\n - Working directory: /work\nToday's date is 2026-11-29."},
            *turns,
        ],
        "tools": [{**BASH, **cached}],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"685b6cde"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **fields,
    }


def tool_result(answer: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """The turns that Claude Code adds after an answer: the answer as it came, and what each of its tools returned."""
    content = [dict(block) for block in answer["content"]]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": text, "is_error": False}
        for block in content
        if block["type"] == "tool_use"
    ]
    added: dict[str, Any] = {"role": "user", "content": results or [{"type": "text", "text": text}]}
    return [{"role": "assistant", "content": content}, added]
