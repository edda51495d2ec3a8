"""Finds members of a request for a response that have no effect."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..openai.body_reader import ignored_members
from ..openapi.request_schemas import ResponsesRequest
from .function_tools import is_left_out

_WITHOUT_EFFECT = ("include", "max_tool_calls", "stream_options")
_REASONING = frozenset({"effort"})
_TEXT = frozenset({"format"})
_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_NAMESPACE = frozenset({"type", "name", "tools"})
_OF_ANY = frozenset({"type", "id", "status"})
_ITEMS: Mapping[str, frozenset[str]] = {
    "message": _OF_ANY | {"role", "content"},
    "reasoning": _OF_ANY | {"content", "summary"},
    "function_call": _OF_ANY | {"call_id", "name", "namespace", "arguments"},
    "function_call_output": _OF_ANY | {"call_id", "output"},
}


def ignored_in_response(fields: ResponsesRequest) -> tuple[str, ...]:
    """Return fields and members that have no effect, each once. The request was checked."""
    found = [name for name in _WITHOUT_EFFECT if getattr(fields, name)]
    if fields.truncation == "auto":  # a longer input is refused all the same
        found.append("truncation")
    found += ignored_members("reasoning", (fields.reasoning,), _REASONING)
    found += ignored_members("text", (fields.text,), _TEXT)
    found += _in_tools(fields.tools or ())
    for item in fields.input if isinstance(fields.input, list) else ():
        found += ignored_members("input[]", (item,), _ITEMS[item.get("type", "message")])
    return tuple(dict.fromkeys(found)) if found else ()


def _in_tools(tools: Any) -> Iterator[str]:
    for tool in tools:
        if is_left_out(tool):
            yield f"tools[].{tool['type']}"
        elif tool.get("type") == "namespace":
            yield from ignored_members("tools[]", (tool,), _NAMESPACE)
            yield from ignored_members("tools[].tools[]", tool["tools"], _TOOL)
        else:
            yield from ignored_members("tools[]", (tool,), _TOOL)
