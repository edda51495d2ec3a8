"""Converts tools and the calls that a model makes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import inference_pb2

Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``, as in OpenAI's API."""
ToolChoice = str | Mapping[str, Any]
"""``none``, ``auto``, ``required`` or ``{"type": "function", "function": {"name": …}}``."""

_MODES = {
    "none": inference_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": inference_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": inference_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has made."""

    id: str
    """Repeat it as ``tool_call_id`` with the result of the call."""
    name: str
    arguments: str
    """JSON as the model wrote it; incomplete if the output was cut off."""


@dataclass(frozen=True)
class ToolCallDelta:
    """New part of a call."""

    index: int
    """Number of the call within its sample."""
    id: str
    """Only in the first part of the call, like the name; otherwise empty."""
    name: str
    arguments: str


def read_delta(delta: inference_pb2.ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(delta.index, delta.id, delta.function.name, delta.function.arguments)


def add_delta(calls: list[ToolCall], delta: ToolCallDelta) -> None:
    """Add a part to the calls so far."""
    if delta.index == len(calls):
        calls.append(ToolCall(delta.id, delta.name, delta.arguments))
    else:
        call = calls[delta.index]
        calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.arguments)


def write_calls(calls: object, where: str) -> list[inference_pb2.ToolCall]:
    """Convert the calls of an assistant's turn. Raises ``InvalidArgument`` naming ``where`` they stand."""
    if isinstance(calls, Sequence) and all(isinstance(call, ToolCall) for call in calls):
        functions = [inference_pb2.FunctionCall(name=call.name, arguments=call.arguments) for call in calls]
        return [inference_pb2.ToolCall(id=call.id, function=each) for call, each in zip(calls, functions, strict=True)]
    raise InvalidArgument(f"{where} must hold objects of tokenloom.client.ToolCall", where)


def write_tools(tools: Sequence[Tool]) -> list[inference_pb2.Tool]:
    """Convert tools. Raises ``InvalidArgument`` naming the tool that is wrong."""
    return [
        inference_pb2.Tool(function=_function(f"tools[{index}].function", tool)) for index, tool in enumerate(tools)
    ]


def write_choice(choice: ToolChoice) -> inference_pb2.ToolChoice:
    """Convert a tool choice. Raises ``InvalidArgument``."""
    if isinstance(choice, str) and choice in _MODES:
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
        return inference_pb2.ToolChoice(function=name)
    raise InvalidArgument(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}', "tool_choice"
    )


def _function(where: str, tool: Tool) -> inference_pb2.Function:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidArgument(f'{where} must be {{"name": …, "description": …, "parameters": {{…}}}}', where)
    parameters = function.get("parameters")
    try:
        return inference_pb2.Function(
            name=function.get("name"),
            description=function.get("description"),
            parameters=None if parameters is None else json.dumps(parameters),
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{where}: {error}", where) from None
