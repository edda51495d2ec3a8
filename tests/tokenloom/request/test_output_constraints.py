import json
from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.output_constraints import (
    MAX_DEPTH,
    MAX_ENUM,
    MAX_SOURCE_BYTES,
    check_structured_outputs,
    json_schema_constraint,
    narrow_structured_outputs,
)
from tokenloom.v1 import types_pb2

Constraint = types_pb2.StructuredOutputs
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        ({"json": {"type": "object"}}, Constraint(json='{"type": "object"}')),
        ({"json": '{"type":"object"}', "regex": None}, Constraint(json='{"type":"object"}')),
        ({"json_object": True}, Constraint(json_object=True)),
        ({"regex": "a+", "json_object": False}, Constraint(regex="a+")),
        ({"choice": ["a", "b"]}, Constraint(choice=types_pb2.Choices(texts=["a", "b"]))),
        ({"grammar": 'root ::= "a"'}, Constraint(grammar='root ::= "a"')),
        ({"regex": "a", "disable_any_whitespace": False, "whitespace_pattern": None}, Constraint(regex="a")),
        (
            {"json_object": True, "disable_any_whitespace": True},
            Constraint(json_object=True, disable_any_whitespace=True),
        ),
        ({"json": "{}", "whitespace_pattern": ""}, Constraint(json="{}", whitespace_pattern="")),
        ({"structural_tag": TAG}, Constraint(structural_tag=json.dumps(TAG))),
        ({"structural_tag": json.dumps(TAG)}, Constraint(structural_tag=json.dumps(TAG))),
    ],
)
def test_vllms_form_is_understood(value: dict[str, Any], wire: Constraint) -> None:
    assert narrow_structured_outputs(value) == wire
    check_structured_outputs(wire)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("json", "must be an object"),
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of"),
        ({"json": {}, "structural_tag": "x"}, "exactly one of"),
        ({"whitespace_pattern": " "}, "exactly one of"),
        ({"json": {}, "disable_fallback": True}, "disable_fallback is not supported"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern is only for json and json_object, not for regex",
        ),
        ({"structural_tag": TAG, "disable_any_whitespace": True}, "not for structural_tag"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "only one of"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern must be text"),
        ({"json": {}, "whitespace_pattern": " " * 1025}, "at most 1024"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        ({"structural_tag": 5}, "must be an object of type"),
        ({"structural_tag": "x" * MAX_SOURCE_BYTES + "y"}, "at most 32768"),
        ({"jsonn": {}}, "'jsonn' is unknown"),
        ({"json": 5}, None),
        ({"json": object()}, "not JSON"),
        ({"json_object": 1}, "must be true or false"),
        ({"regex": 5}, "regex must be text"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": "abc"}, "must be a list"),
        ({"choice": ["a", 5]}, "must be text"),
    ],
)
def test_what_is_not_understood_is_named(value: Any, words: str | None) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        check_structured_outputs(narrow_structured_outputs(value, "field"), "field")
    assert caught.value.field == "field"


def test_a_schema_too_deep_for_python_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="nested more than"):
        json_schema_constraint(nested(100_000))


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint(), "must have one of"),
        (Constraint(json_object=False), "must be true"),
        (Constraint(json=""), "json is empty"),
        (Constraint(json="{"), "not JSON"),
        (Constraint(json="[]"), "must be an object"),
        (Constraint(json="[" * 30_000), "nested more than"),
        (Constraint(json=json.dumps(nested(MAX_DEPTH + 1))), "nested more than"),
        (Constraint(json=json.dumps({"a": [{"enum": list(range(MAX_ENUM + 1))}]})), "1001 values"),
        (Constraint(json=json.dumps({"title": "x" * MAX_SOURCE_BYTES})), "at most 32768"),
        (Constraint(regex="é" * MAX_SOURCE_BYTES), "at most 32768"),
        (Constraint(grammar="x" * MAX_SOURCE_BYTES + "y"), "at most 32768"),
        (Constraint(choice=types_pb2.Choices()), "1 to 1000"),
        (Constraint(choice=types_pb2.Choices(texts=["a"] * 1001)), "1 to 1000"),
        (Constraint(choice=types_pb2.Choices(texts=["a", ""])), "empty text"),
        (Constraint(choice=types_pb2.Choices(texts=["x" * 1000] * 40)), "at most 32768"),
    ],
)
def test_limits(constraint: Constraint, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        check_structured_outputs(constraint)
    assert caught.value.field == "structured_outputs"


def test_what_is_within_the_limits_passes() -> None:
    check_structured_outputs(Constraint(json=json.dumps(nested(MAX_DEPTH))))
    check_structured_outputs(Constraint(json=json.dumps({"title": "[" * 100 + '\\"{', "enum": list(range(MAX_ENUM))})))
    check_structured_outputs(Constraint(choice=types_pb2.Choices(texts=["a"] * MAX_ENUM)))
