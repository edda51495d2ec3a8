"""Finds members of a message request that have no effect."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..openai.body_reader import ignored_members
from ..openapi.request_schemas import MessagesRequest

_TURN = frozenset({"role", "content"})
_TOOL = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_METADATA = frozenset({"user_id"})
_THINKING = frozenset({"type", "budget_tokens"})
_OUTPUT = frozenset({"effort", "format"})
_CHOICE = frozenset({"type", "name", "disable_parallel_tool_use"})
_BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "document": frozenset({"type", "source", "cache_control"}),
    "image": frozenset({"type", "source", "cache_control"}),
}
"""The members of a block that are read, or that only the service which made them can read."""


def ignored_in_message(fields: MessagesRequest, *, keeps_budget: bool) -> tuple[str, ...]:
    """Return the members of a request that have no effect, each once. The request was checked.

    ``keeps_budget``: whether a budget of thinking is kept.
    """
    found = [*_in_blocks("system[]", fields.system), *ignored_members("messages[]", fields.messages, _TURN)]
    for turn in fields.messages:
        found += _in_blocks("messages[].content[]", turn.get("content"))
    found += ignored_members("tools[]", fields.tools or (), _TOOL)
    if fields.metadata:
        found += ignored_members("metadata", (fields.metadata,), _METADATA)
    found += ignored_members("tool_choice", (fields.tool_choice,), _CHOICE)
    found += ignored_members(
        "thinking", (fields.thinking,), _THINKING if keeps_budget else _THINKING - {"budget_tokens"}
    )
    found += ignored_members("output_config", (fields.output_config,), _OUTPUT)
    return tuple(dict.fromkeys(found)) if found else ()


def _in_blocks(where: str, blocks: str | Sequence[Any] | None) -> Iterator[str]:
    if not isinstance(blocks, list):
        return
    for block in blocks:
        yield from ignored_members(where, (block,), _BLOCKS[block["type"]])
        if block["type"] == "tool_result":
            yield from _in_blocks(f"{where}.content[]", block.get("content"))
