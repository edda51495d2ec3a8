"""Finds members of a request for a response that have no effect."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..openai.body_reader import ignored_members
from ..openapi.request_schemas import ResponsesRequest
from ..records.cache_marks import OPTIONS
from .function_tools import is_left_out
from .mcp_tools import McpTool

_WITHOUT_EFFECT = ("include", "max_tool_calls", "stream_options")
_REASONING = frozenset({"effort"})
_CACHE_OPTIONS = frozenset({"mode", "ttl", "comparison_response_id"})
_TEXT = frozenset({"format"})
_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_NAMESPACE = frozenset({"type", "name", "tools"})
_MCP = frozenset(
    {"type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval"}
    | {"headers", "authorization"}
)
_OF_ANY = frozenset({"type", "id", "status"})
_ITEMS: Mapping[str, frozenset[str]] = {
    "message": _OF_ANY | {"role", "content"},
    "reasoning": _OF_ANY | {"content", "summary"},
    "function_call": _OF_ANY | {"call_id", "name", "namespace", "arguments"},
    "function_call_output": _OF_ANY | {"call_id", "output"},
    "compaction": _OF_ANY | {"encrypted_content", "created_by"},
    "mcp_list_tools": _OF_ANY | {"server_label", "tools", "error"},
    "mcp_call": _OF_ANY | {"server_label", "name", "arguments", "output", "error", "approval_request_id"},
    "mcp_approval_request": _OF_ANY | {"server_label", "name", "arguments"},
    "mcp_approval_response": _OF_ANY | {"approval_request_id", "approve", "reason"},
}


def ignored_in_response(fields: ResponsesRequest, hosted: Mapping[int, McpTool]) -> tuple[str, ...]:
    """Return fields and members that have no effect, each once. The request was checked. ``hosted``: the tools that the
    gateway runs, by index."""
    found = [name for name in _WITHOUT_EFFECT if getattr(fields, name) and not (hosted and name == "max_tool_calls")]
    if fields.truncation == "auto":  # a longer input is refused all the same
        found.append("truncation")
    found += ignored_members("reasoning", (fields.reasoning,), _REASONING)
    found += ignored_members("text", (fields.text,), _TEXT)
    found += ignored_members(OPTIONS, (fields.prompt_cache_options,), _CACHE_OPTIONS)
    found += _in_tools(fields.tools or (), hosted)
    for item in fields.input if isinstance(fields.input, list) else ():
        found += ignored_members("input[]", (item,), _ITEMS[item.get("type", "message")])
    return tuple(dict.fromkeys(found)) if found else ()


def _in_tools(tools: Any, hosted: Mapping[int, McpTool]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        if (run := hosted.get(index)) is not None:
            known = _MCP if run.takes_headers else _MCP - {"headers", "authorization"}
            yield from ignored_members("tools[]", (tool,), known)
        elif is_left_out(tool):
            yield f"tools[].{tool['type']}"
        elif tool.get("type") == "namespace":
            yield from ignored_members("tools[]", (tool,), _NAMESPACE)
            yield from ignored_members("tools[].tools[]", tool["tools"], _TOOL)
        else:
            yield from ignored_members("tools[]", (tool,), _TOOL)
