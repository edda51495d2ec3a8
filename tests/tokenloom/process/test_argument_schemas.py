"""Schemas of plugins' arguments, and how the arguments of a request are checked."""

import json
from typing import Any

import msgspec
import pytest

from tokenloom.process import argument_schemas

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ban": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 2},
        "mode": {"enum": ["soft", "hard", 1]},
        "scale": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 2},
        "words": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"],
                  "additionalProperties": False},
    },
    "required": ["ban"],
}  # fmt: skip
OTHER = {"properties": {"flag": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"ban": [1, 2.0]}, ""),
        ({"ban": [1], "mode": "soft", "scale": None, "words": {"a": "xy"}, "flag": True}, ""),
        ({"flag": False}, ""),  # the first schema is not asked
        ({}, ""),
        ({"mode": "soft"}, "needs ban"),
        ({"ban": []}, "ban must be a list of at least 1 items"),
        ({"ban": [1, 2, 3]}, "ban must be a list of at most 2 items"),
        ({"ban": [1, -1]}, "ban[1] must be at least 0"),
        ({"ban": [True]}, "ban[0] must be of the type integer, not true"),
        ({"ban": "1"}, 'ban must be of the type array, not "1"'),
        ({"ban": [1], "mode": True}, 'mode must be one of ["soft", "hard", 1], not true'),
        ({"ban": [1], "scale": 0}, "scale must be above 0"),
        ({"ban": [1], "scale": 2.5}, "scale must be at most 2"),
        ({"ban": [1], "words": {"b": 1}}, "words needs a"),
        ({"ban": [1], "words": {"a": "x", "b": 1}}, "words.b is unknown"),
        ({"ban": [1], "words": {"a": "xyz"}}, "words.a must be a text of at most 2 characters"),
        ({"bna": [1]}, "no plugin of the engines reads 'bna'; they read: ban, flag, mode, scale, words"),
    ],
)
def test_arguments_obey_their_schema(arguments: dict[str, Any], problem: str) -> None:
    schemas = [argument_schemas.check_schema(SCHEMA), argument_schemas.check_schema(OTHER)]
    assert argument_schemas.problem_of(json.dumps(arguments), schemas) == problem


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (str(2**64 - 1), ""),
        (str(-(2**63)), ""),
        (str(2**64), "a whole number has more than 64 bits"),
        ("1" * 400, "a whole number has more than 64 bits"),  # as a float it is too large to be compared
        ("[-9223372036854775809]", "a whole number has more than 64 bits"),
        ("[1e400]", "a number is too large"),
        ('{"a": ["\\ud83d"]}', "a text holds half of a surrogate pair"),
        ('{"\\ude00": 1}', "a text holds half of a surrogate pair"),
        ('"\\ud83d\\ude00"', ""),
        ("[" * 30 + "]" * 30, ""),
        ("[" * 40 + "]" * 40, "it is nested more than 32 deep"),
    ],
)
def test_arguments_that_no_core_can_be_sent_are_refused(value: str, problem: str) -> None:
    """Each once raised an error that was not the request's, where a schema compared it or when it was sent."""
    schema = argument_schemas.check_schema({"properties": {"any": {"minimum": -(2**63)}}})
    text = f'{{"any": {value}}}'
    assert argument_schemas.problem_of(text, [schema]) == problem
    if not problem:
        msgspec.msgpack.encode(json.loads(text))


@pytest.mark.parametrize("text", ["", "[1]", "1", '{"ban": [NaN]}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    assert argument_schemas.problem_of(text, [argument_schemas.check_schema(SCHEMA)])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (None, "must be an object with properties"),
        ({"properties": {}}, "must be an object with properties"),
        ({"type": "array", "properties": {"a": {}}}, "has the type 'array'; it must be object"),
        ({"properties": {"a": {"pattern": "x"}}}, "the schema of a has pattern; checked are additionalProperties"),
        ({"properties": {"a": {"type": "int"}}}, "the schema of a has the type 'int'; the types are boolean"),
        ({"properties": {"a": {"items": 1}}}, r"the schema of a\[\] must be an object, not 1"),
        ({"properties": {"a": {"additionalProperties": {}}}}, "additionalProperties true or false"),
        ({"properties": {"a": {"enum": 5}}}, "the schema of a must have as enum a list of values, not 5"),
        ({"properties": {"a": {"enum": "soft"}}}, "as enum a list of values, not 'soft'"),
        ({"properties": {"a": {"minimum": "0"}}}, "as minimum a number, not '0'"),
        ({"properties": {"a": {"exclusiveMinimum": True}}}, "as exclusiveMinimum a number, not True"),
        ({"properties": {"a": {"maxItems": -1}}}, "as maxItems a whole number, not -1"),
        ({"properties": {"a": {"type": ["integer", []]}}}, "as type a name or names"),
        ({"properties": {"a": {"type": []}}}, "as type a name or names"),
        ({"properties": {"a": {"properties": ["b"]}}}, r"as properties an object, not \['b'\]"),
        ({"properties": {"a": {"required": "b"}}}, "as required a list of names, not 'b'"),
        ({"properties": {"a": {}}, "required": ["b"]}, "the arguments requires 'b', which is none of its properties"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        argument_schemas.check_schema(schema)


def test_two_plugins_declare_no_common_argument() -> None:
    one, two = argument_schemas.check_schema(SCHEMA), argument_schemas.check_schema({"properties": {"ban": {}}})
    argument_schemas.check_apart({"a:x": one, "b:y": argument_schemas.check_schema(OTHER)})
    with pytest.raises(ValueError, match="the plugins a:x and b:y both declare the argument ban"):
        argument_schemas.check_apart({"a:x": one, "b:y": two})
