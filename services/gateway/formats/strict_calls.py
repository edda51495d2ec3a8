"""Constrains calls: those that a client forces, and the arguments of strict tools that the model may call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.request.json_schema import moved, of_objects
from tokenloom.request.output_constraints import (
    MAX_FORMATS,
    check_structured_outputs,
    json_schema_constraint,
    relax,
    structural_tag_constraint,
)
from tokenloom.request.tool_format import REQUIRED, ToolFormat
from tokenloom.v1 import types_pb2

from .call_tags import call_tag, forced_format, num_formats, section_tag
from .message_parts import CallArguments, CallBegin, ToolPart
from .tool_request import Tool, ToolChoice, ToolRequest


@dataclass(frozen=True, slots=True)
class Forced:
    """How calls are made that a client demands."""

    constraint: types_pb2.StructuredOutputs
    """On the output."""
    lost: Sequence[str]
    """The names of the keywords of schemas that it leaves out."""
    form: ToolFormat | None
    """How the calls are written; None: the output is the arguments of the named one."""


def force(request: ToolRequest, form: ToolFormat | None) -> Forced:
    """Return how a request's calls are forced. ``form``: how the model writes calls; None: unknown.

    Raises ``InvalidArgument`` for schemas beyond the limits.
    """
    lost: list[str] = []
    if form is not None and form.demands_calls:
        # As the model was trained to write calls, and as its template writes them again in the next turn.
        tools = request.tools if request.named is None else [request.named]
        tags = [call_tag(form, tool.name, _arguments(tool, lost)) for tool in tools]
        wanted = forced_format(form, tags, parallel=request.parallel and request.named is None)
        if num_formats(wanted) <= MAX_FORMATS:
            constraint = structural_tag_constraint({"type": "structural_tag", "format": wanted}, "tools")
            check_structured_outputs(constraint, "tools")
            return Forced(constraint, lost, form)
        lost = []
    if request.named is not None:
        # JSON is a form that each model knows.
        constraint = json_schema_constraint(_arguments(request.named, lost), "tools")
    else:
        schema = _list_schema(request.tools, lost, parallel=request.parallel)
        constraint = json_schema_constraint(schema, "tools")
    check_structured_outputs(constraint, "tools")
    return Forced(constraint, lost, None if request.named is not None else REQUIRED)


def _arguments(tool: Tool, lost: list[str]) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are always an object. Adds to ``lost``; raises
    ``InvalidArgument``."""
    constraint = json_schema_constraint(tool.parameters, tool.where)
    lost += relax(constraint, tool.where, strict=_is_strict(tool))
    return of_objects(json.loads(constraint.json))


class NamedCall:
    """Reads an output that consists of the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begin: list[ToolPart] = [CallBegin(name)]

    @property
    def is_within_call(self) -> bool:
        return not self._begin  # a constraint ends the output with the call

    def feed(self, text: str) -> list[ToolPart]:
        parts, self._begin = self._begin, []
        return [*parts, CallArguments(text)]

    def finish(self) -> list[ToolPart]:
        return self._begin


def _list_schema(tools: Sequence[Tool], lost: list[str], *, parallel: bool) -> Mapping[str, Any]:
    """Return the schema of an array of calls. Each tool's schema keeps its own ``$ref``s, now below ``$defs``."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    defs = {f"tool{at}": moved(_arguments(tool, lost), f"#/$defs/tool{at}") for at, tool in enumerate(tools)}
    return {**schema, "$defs": defs}


_ANY_OBJECT = {"type": "object"}


def has_strict(tools: Sequence[Tool]) -> bool:
    """Return whether a tool's arguments must follow its schema."""
    return any(map(_is_strict, tools))


def strict_constraint(request: ToolRequest, form: ToolFormat) -> types_pb2.StructuredOutputs | None:
    """Return the constraint of a choice that is left to the model; None if no tool is strict, or if the tools are
    beyond the limit of formats.

    The text is free until a call begins. The call then names one of the tools, and its arguments follow the schema of
    that tool if it is strict. Raises ``InvalidArgument`` for schemas beyond the limits.
    """
    # The whole output cannot be a schema, because the model decides whether to call. Without a strict tool nothing is
    # compiled.
    if request.choice is not ToolChoice.AUTO or not has_strict(request.tools):
        return None
    schemas = [_arguments(tool, []) if _is_strict(tool) else _ANY_OBJECT for tool in request.tools]
    tags = [call_tag(form, tool.name, schema) for tool, schema in zip(request.tools, schemas, strict=True)]
    if form.section[0] and form.is_marked:
        tags = [section_tag(form, tags, parallel=request.parallel)]
    for tag in tags:
        tag["begin"] = tag["begin"].lstrip()
    trigger = form.openings[0] if form.is_marked else form.before_name  # a mark may go on with the name of the tool
    calls: dict[str, Any] = {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
    if not request.parallel:
        calls["stop_after_first"] = True
    if num_formats(calls) > MAX_FORMATS:
        return None
    constraint = structural_tag_constraint({"type": "structural_tag", "format": calls}, "tools")
    check_structured_outputs(constraint, "tools")
    return constraint


def _is_strict(tool: Tool) -> bool:
    return tool.definition["function"].get("strict") is True
