"""Translates the tools of a request for a response into those of a chat."""

from collections.abc import Mapping
from typing import Any

from tokenloom.request.errors import InvalidArgument

from ..openapi.response_api_schemas import ResponsesRequest

_HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "mcp",
    "tool_search",
)
"""Beginnings of the types of tools that run at OpenAI. An agent offers them with every request, whether or not its
server has them; the model is not shown what it could not call."""


def is_left_out(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool runs at OpenAI, and is therefore not shown to the model."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def tools_of(fields: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a chat about tools. Raises ``InvalidArgument`` naming the tool."""
    given = enumerate(fields.tools or ())
    tools = [_tool(f"tools[{index}]", tool) for index, tool in given if not is_left_out(tool)]
    choice = _choice(fields.tool_choice)
    if not tools and choice in (None, "auto", "none"):
        return {}
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": fields.parallel_tool_calls}


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:64]
        message = f"{where}.type: {kind!r} is not supported; send functions, which the client runs"
        raise InvalidArgument(message, f"{where}.type")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    """Return a choice in the form of chats, where the name of a function is one level deeper."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": {**choice, "tools": list(map(_choice, choice["tools"]))}}
    return choice
