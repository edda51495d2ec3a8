"""Binds the arguments of strict tools when the model itself decides whether to call one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.request.output_constraints import check_structured_outputs, structural_tag_constraint
from tokenloom.v1 import types_pb2

from .tool_request import Tool, ToolChoice, ToolRequest

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The texts around the name and the arguments of a call, as a family of models writes them."""

    trigger: str
    """Text with which every call, and nothing else, begins."""
    before_name: str
    before_arguments: str
    end: str


def has_strict(tools: Sequence[Tool]) -> bool:
    """Return whether a tool's arguments must follow its schema."""
    return any(map(_is_strict, tools))


def strict_constraint(request: ToolRequest, marks: CallMarks) -> types_pb2.StructuredOutputs | None:
    """Return the constraint of a choice that is left to the model; None if no tool is strict.

    The text is free until a call begins. The call then names one of the tools, and its arguments follow the schema of
    that tool if it is strict. Raises ``InvalidArgument`` for schemas beyond the limits.
    """
    # The whole output cannot be a schema, because the model decides whether to call. Without a strict tool nothing is
    # compiled.
    if request.choice is not ToolChoice.AUTO or not has_strict(request.tools):
        return None
    calls: dict[str, Any] = {
        "type": "triggered_tags",
        "triggers": [marks.trigger],
        "tags": [_tag(tool, marks) for tool in request.tools],
    }
    if not request.parallel:
        calls["stop_after_first"] = True
    constraint = structural_tag_constraint({"type": "structural_tag", "format": calls}, "tools")
    check_structured_outputs(constraint, "tools")
    return constraint


def _tag(tool: Tool, marks: CallMarks) -> dict[str, Any]:
    schema = tool.parameters if _is_strict(tool) else _ANY_OBJECT
    return {
        "type": "tag",
        "begin": f"{marks.before_name}{tool.name}{marks.before_arguments}",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": marks.end,
    }


def _is_strict(tool: Tool) -> bool:
    return tool.definition["function"].get("strict") is True
