"""Reads ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenloom.request.errors import InvalidArgument

MAX_TOOLS = 128
"""Limit of one request, as in OpenAI's API."""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    definition: Mapping[str, Any]
    """As the client sent it, for templates."""
    where: str = "tools"
    """The path of its schema in a chat's body, for errors."""


class ToolChoice(Enum):
    """What the model may do with its tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of a request, and what the model may do with them."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = ToolChoice.NONE
    named: Tool | None = None
    """The only one that may be called."""
    parallel: bool = True
    """Whether more than one call may be made."""

    @property
    def is_forced(self) -> bool:
        """Whether a call must be made."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)


NO_TOOLS = ToolRequest()


def read_tool_request(tools: object, choice: object, parallel: bool | None) -> ToolRequest:
    """Return the tools and the choice among them. Raises ``InvalidArgument`` naming the field."""
    known = read_tools(tools)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, known = _allowed(choice, known)
    if choice is None:
        choice = "auto" if known else "none"
    if choice == "none" or (choice == "auto" and not known):
        return ToolRequest(known)
    if not known:
        raise InvalidArgument("tool_choice needs tools", "tool_choice")
    several = parallel is not False
    if choice in ("auto", "required"):
        return ToolRequest(known, ToolChoice(choice), parallel=several)
    return ToolRequest(known, ToolChoice.NAMED, _named(choice, known), parallel=several)


def read_tools(tools: object) -> Sequence[Tool]:
    """Return the tools. Raises ``InvalidArgument`` naming the tool."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidArgument("tools must be a list of tools", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument(f"tools may hold at most {MAX_TOOLS}, not {len(tools)}", "tools")
    known = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    if len({tool.name for tool in known}) < len(known):
        raise InvalidArgument("two functions in tools have the same name", "tools")
    return known


def _tool(where: str, tool: object) -> Tool:
    if isinstance(tool, dict) and (kind := tool.get("type", "function")) != "function":
        raise InvalidArgument(f"{where}.type: {kind!r:.64} is not supported; send functions", f"{where}.type")
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
        raise InvalidArgument(f'{where} must be {{"type": "function", "function": {{…}}}}', where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        field = f"{where}.function.name"
        raise InvalidArgument(f"{field} must have 1 to 64 letters, digits, underscores, dots or dashes", field)
    if not (parameters is None or isinstance(parameters, dict)):
        field = f"{where}.function.parameters"
        raise InvalidArgument(f"{field} must be a JSON schema, an object", field)
    if not (function.get("description") is None or isinstance(function["description"], str)):
        field = f"{where}.function.description"
        raise InvalidArgument(f"{field} must be a string", field)
    schema = _NO_ARGUMENTS if parameters is None else parameters
    return Tool(name, schema, {"type": "function", **tool}, f"{where}.function.parameters")


def _allowed(choice: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, Sequence[Tool]]:
    """Return the mode of a choice among some of the tools, and those tools."""
    allowed = choice.get("allowed_tools")
    named = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required") or not isinstance(named, list):
        raise InvalidArgument(
            'tool_choice must be {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": '
            "[…]}}",
            "tool_choice",
        )
    choices = {"type": "function"}
    wanted = [_named(choices | item if isinstance(item, dict) else item, tools) for item in named]
    return str(allowed["mode"]), [tool for tool in tools if tool in wanted]


def _named(choice: object, tools: Sequence[Tool]) -> Tool:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    for tool in tools:
        if tool.name == function["name"]:
            return tool
    raise InvalidArgument(f"tool_choice: no tool is named {function['name'][:64]!r}", "tool_choice")
