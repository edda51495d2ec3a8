"""Tests that objects hold only what their schemas name, and that no schema becomes unsatisfiable by that."""

import json
from typing import Any

import pytest

from tests.engine_core.structured_output.helpers import backend, tokenizer
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.grammar_backend import close_objects

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**NAMED, "additionalProperties": False}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(close_objects(json.dumps(schema)))
    return made


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"prefixItems": [NAMED]}, {"prefixItems": [CLOSED]}),
        ({"type": "object", "additionalProperties": NAMED}, {"type": "object", "additionalProperties": CLOSED}),
        ({"$ref": "#/$defs/x", "$defs": {"x": NAMED}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
    ],
)
def test_named_properties_are_all(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string"},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "patternProperties": {"^x": {"type": "integer"}}},
        {**NAMED, "required": ["a", "b"]},
        {**NAMED, "required": [{}]},
        {**NAMED, "required": "a"},
        {**NAMED, "minProperties": 2},
        {**NAMED, "minProperties": "2"},
        {"allOf": [NAMED, {"properties": {"b": {"type": "integer"}}}]},
        {**NAMED, "anyOf": [{"required": ["b"]}]},
        {**NAMED, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}},
        {"properties": {"x": {"not": NAMED}}},
        {"const": {"properties": {"a": 1}}},
        {"enum": [{"properties": {"a": 1}}]},
    ],
)
def test_a_schema_that_combines_parts_is_unchanged(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_no_other_property_may_be_written() -> None:
    compiler = backend()
    grammar = compiler.load(compiler.prepare(StructuredOutput(GrammarKind.JSON, json.dumps(NAMED)))).start()
    for text, follows in (('{"a": 5}', True), ('{"a": 5, "b": 6}', False), ('{"b": 6', False)):
        ids = tokenizer().encode(text).ids
        assert (grammar.validate_tokens(ids) == len(ids)) is follows, text
