"""Calls that the request forces: decoding is constrained to JSON, whatever the model's own format is."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.request.output_constraints import check_structured_outputs, json_schema_constraint
from tokenloom.v1 import types_pb2

from .call_list import CallList
from .message_parts import CallArguments, CallBegin, ToolPart
from .tool_request import Tool, ToolChoice, ToolRequest


def constraint_of(request: ToolRequest) -> types_pb2.StructuredOutputs | None:
    """Return the constraint on the output, if any. Raises ``InvalidArgument`` for schemas beyond the limits."""
    if request.named is not None:
        # As in vLLM, a call that is required or named is decoded as JSON whatever the model's own format is, so that it
        # works with any model.
        constraint = json_schema_constraint(request.named.parameters, "tools")
    elif request.choice is ToolChoice.REQUIRED:
        constraint = json_schema_constraint(_list_schema(request.tools, parallel=request.parallel), "tools")
    else:
        return None
    check_structured_outputs(constraint, "tools")
    return constraint


class NamedCall:
    """Reads an output that consists of the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begin: list[ToolPart] = [CallBegin(name)]

    def feed(self, text: str) -> list[ToolPart]:
        parts, self._begin = self._begin, []
        return [*parts, CallArguments(text)]

    def finish(self) -> list[ToolPart]:
        return self._begin


class RequiredCalls:
    """Reads an output that is a JSON array of calls."""

    def __init__(self) -> None:
        self._calls = CallList()

    def feed(self, text: str) -> list[ToolPart]:
        return self._calls.feed(text)[0]

    def finish(self) -> list[ToolPart]:
        return self._calls.finish()


def _list_schema(tools: Sequence[Tool], *, parallel: bool) -> Mapping[str, Any]:
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
    defs = {f"tool{index}": _moved(tool.parameters, f"#/$defs/tool{index}") for index, tool in enumerate(tools)}
    return {**schema, "$defs": defs}


def _moved(schema: Mapping[str, Any], to: str) -> Any:
    """Return the schema with references to its own parts moved below ``to``."""
    source = json.dumps(schema)  # a schema that is nested too deeply fails here as in the check
    if '"$ref"' not in source:
        return schema
    return json.loads(source, object_hook=lambda part: _redirected(part, to))


def _redirected(part: dict[str, Any], to: str) -> dict[str, Any]:
    ref = part.get("$ref")
    return {**part, "$ref": to + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else part
