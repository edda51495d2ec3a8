"""OpenAI's ``response_format``: what it asks of an output, as a structured output."""

from collections.abc import Mapping

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.output_constraints import (
    check_structured_outputs,
    json_schema_constraint,
    structural_tag_constraint,
)
from tokenloom.v1 import types_pb2

FIELD = "response_format"
_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def read_response_format(value: object) -> types_pb2.StructuredOutputs | None:
    """The constraint; None: any text. ``strict`` changes nothing, schemas are always obeyed.

    Raises :class:`errors.InvalidArgument` naming the field.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{FIELD} must be an object with a type", FIELD)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return types_pb2.StructuredOutputs(json_object=True)
    if kind == "structural_tag":
        constraint = structural_tag_constraint(dict(value), FIELD)
        check_structured_outputs(constraint, FIELD)
        return constraint
    if kind != "json_schema":
        raise InvalidArgument(f"{FIELD}: type must be one of {', '.join(_TYPES)}, not {kind!r:.64}", FIELD)
    wrapped = value.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidArgument(f'{FIELD}: json_schema must be {{"name": …, "schema": {{…}}}}', FIELD)
    constraint = json_schema_constraint(schema, FIELD)
    check_structured_outputs(constraint, FIELD)
    return constraint
