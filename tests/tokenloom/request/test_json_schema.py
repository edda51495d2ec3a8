import json
from typing import Any

import pytest

from tests.linear_time import grows_too_fast
from tokenloom.request.json_schema import LostKeyword, fit, fitted, moved, of_objects

TEXT = {"type": "string"}
CITY = {"type": "object", "properties": {"city": TEXT}}


def fit_copy(schema: Any) -> tuple[Any, list[tuple[str, str]]]:
    source, lost = fitted(json.dumps(schema))
    return json.loads(source), [(each.keyword, each.where) for each in lost]


@pytest.mark.parametrize("form", ["password", "uuid4", "binary", "file-path", "cuid", "int32", 7])
def test_a_format_that_is_not_enforced_is_an_annotation(form: object) -> None:
    assert fit_copy(TEXT | {"format": form}) == (TEXT, [])


def test_a_format_that_is_enforced_stays() -> None:
    source = '{"type":"string","format":"date-time"}'
    assert fitted(source) == (source, [])


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("uniqueItems", True),
        ("contains", TEXT),
        ("not", TEXT),
        ("dependentRequired", {"a": ["b"]}),
        ("propertyNames", {"pattern": "^x"}),
        ("unevaluatedItems", False),
        ("$dynamicRef", "#node"),
        ("maximum", 3.4e38),
        ("exclusiveMinimum", -(10**20)),
        ("multipleOf", 1e-12),
        ("type", "any"),
        ("$ref", "https://example.com/city.json"),
        ("$ref", "#/$defs/missing"),
    ],
)
def test_a_keyword_that_no_grammar_expresses_is_left_out(keyword: str, value: object) -> None:
    schema = {"properties": {"a/b": {"title": "x", keyword: value}}}
    assert fit_copy(schema) == ({"properties": {"a/b": {"title": "x"}}}, [(keyword, "#/properties/a~1b")])


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"uniqueItems": False}, {}),
        ({"type": "object", "propertyNames": TEXT}, {"type": "object"}),
        ({"then": {}, "minContains": 1}, {}),
        ({"properties": {"never": {"not": {}}}}, {"properties": {"never": False}}),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
        ({"$schema": "https://example.com/own"}, {}),
    ],
)
def test_what_has_no_effect_or_another_spelling_is_not_named(schema: Any, fits: Any) -> None:
    assert fit_copy(schema) == (fits, [])


def test_properties_of_a_condition_stay_possible() -> None:
    schema = {**CITY, "if": {"required": ["city"]}, "then": {"properties": {"zip": TEXT}, "required": ["zip"]}}
    assert fit_copy(schema) == ({**CITY, "additionalProperties": True}, [("if", "#")])


def test_properties_whose_names_no_grammar_finds_stay_possible() -> None:
    schema = {"patternProperties": {"^(?=x)": TEXT, "^y": TEXT}, "additionalProperties": False}
    fits = {"patternProperties": {"^y": TEXT}, "additionalProperties": True}
    assert fit_copy(schema) == (fits, [("patternProperties", "#")])


def test_values_are_not_schemas() -> None:
    schema = {
        "const": {"not": TEXT},
        "enum": [{"format": "x"}],
        "default": {"uniqueItems": True},
        "examples": [{"if": 1}],
    }
    assert fit_copy(schema) == (schema, [])


@pytest.mark.parametrize(
    "branches",
    [
        [TEXT, {"type": "number"}],
        [{"const": "a"}, {"enum": ["b", "c"]}],
        [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"],
        [{"$ref": "#/$defs/text"}, {"type": "null"}],
        [{**CITY, "additionalProperties": False}, {"type": "object", "required": ["zip"]}],
    ],
)
def test_one_of_branches_that_exclude_each_other_is_any_of(branches: Any) -> None:
    fits, lost = fit_copy({"oneOf": branches, "$defs": {"text": TEXT}})
    assert (fits["anyOf"], lost) == (branches, [])


def test_one_of_branches_that_overlap_is_named() -> None:
    assert fit_copy({"oneOf": [TEXT, {"minLength": 3}]}) == ({"anyOf": [TEXT, {"minLength": 3}]}, [("oneOf", "#")])


def test_references_follow_what_moved() -> None:
    schema = {"properties": {"a": {"oneOf": [CITY, TEXT]}, "b": {"$ref": "#/properties/a/oneOf/0"}}}
    fits, lost = fit_copy(schema)
    assert (fits["properties"]["b"], lost) == ({"$ref": "#/properties/a/anyOf/0"}, [])


def test_parts_that_only_references_reach_are_fitted() -> None:
    schema = {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"uniqueItems": True}}}}
    assert fit(schema) == [LostKeyword("uniqueItems", "#/components/schemas/A")]


def test_addresses_within_the_document_stay() -> None:
    schema = {"$id": "https://example.com/root", "$ref": "item", "$defs": {"item": {"$id": "item", **TEXT}}}
    assert fit_copy(schema) == (schema, [])


@pytest.mark.parametrize(
    ("schema", "objects"),
    [
        (CITY, CITY),
        ({}, {"type": "object"}),
        ({"properties": {"city": TEXT}}, CITY),
        (TEXT, {"type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"anyOf": [TEXT, CITY, True]}, {"type": "object", "anyOf": [CITY, {"type": "object"}]}),
        ({"anyOf": [TEXT]}, {"type": "object"}),
        ({"enum": ["a", {"b": 1}]}, {"type": "object", "enum": [{"b": 1}]}),
        ({"const": "a"}, {"type": "object"}),
        ({"allOf": [TEXT]}, {"type": "object"}),
        ({"allOf": [True, {"anyOf": [TEXT]}]}, {"type": "object"}),
        ({"allOf": [CITY]}, {"type": "object", "allOf": [CITY]}),
        ({"anyOf": [{"allOf": [TEXT]}, CITY]}, {"type": "object", "anyOf": [CITY]}),
    ],
)
def test_only_objects_remain(schema: Any, objects: Any) -> None:
    assert of_objects(schema) == objects


def test_only_objects_remain_of_what_a_reference_names() -> None:
    either = {"anyOf": [TEXT, {"$ref": "#/$defs/either"}, CITY]}
    objects = of_objects({"$ref": "#/$defs/either", "$defs": {"either": either}})
    assert objects["$defs"]["either"] == either
    assert "$ref" not in objects
    assert [branch["type"] for branch in objects["anyOf"]] == ["object", "object"]


def test_what_a_reference_names_is_joined_with_what_stands_beside_it() -> None:
    either = {"anyOf": [TEXT, CITY]}
    objects = of_objects({"$ref": "#/$defs/either", "anyOf": [True], "$defs": {"either": either}})
    assert objects["allOf"] == [{"type": "object", "anyOf": [CITY]}]


def test_a_reference_to_an_object_stays() -> None:
    schema = {"$ref": "#/$defs/city", "$defs": {"city": CITY}}
    assert of_objects(schema) == {**schema, "type": "object"}


def test_references_move_with_their_schema_and_values_do_not() -> None:
    value = {"$ref": "#/no-reference"}
    schema = {
        "$id": "https://example.com/tool",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {
            "a": {"$ref": "#/$defs/a"},
            "b": {"const": value},
            "c": {"$ref": "https://example.com/tool#/$defs/a"},
        },
        "$defs": {"a": {"$ref": "#"}},
    }
    assert moved(schema, "#/$defs/tool0") == {
        "properties": {
            "a": {"$ref": "#/$defs/tool0/$defs/a"},
            "b": {"const": value},
            "c": {"$ref": "#/$defs/tool0/$defs/a"},
        },
        "$defs": {"a": {"$ref": "#/$defs/tool0"}},
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": [[]]},
        {"type": ["object", {}]},
        {"oneOf": [CITY | {"required": 5}, CITY | {"required": ["city"]}]},
        {"oneOf": [TEXT], "anyOf": [TEXT], "allOf": 5},
        {"$id": "http://[", "$ref": "city"},
        {"anyOf": [TEXT], "items": {"$ref": "#/anyOf/\u00b2"}},
        {"anyOf": [TEXT], "items": {"$ref": "#/anyOf/" + "1" * 5000}},
    ],
)
def test_values_of_odd_types_are_no_errors_of_ours(schema: dict[str, Any]) -> None:
    fitted(json.dumps(schema))
    fit(schema)
    of_objects(schema)


def test_a_chain_of_references_may_be_longer_than_the_stack() -> None:
    parts: dict[str, Any] = {f"a{at}": {"items": {"$ref": f"#/$defs/a{at + 1}"}} for at in range(900)}
    schema: dict[str, Any] = {"$defs": parts | {"a900": {"format": "cuid"}}, "$ref": "#/$defs/a0"}
    assert fit(schema) == []
    assert schema["$defs"]["a900"] == {}
    assert of_objects(schema)["type"] == "object"


def test_branches_that_hold_themselves_are_compared_up_to_some_level() -> None:
    parts = {
        name: {"type": "object", "required": ["x"], "properties": {"x": {"$ref": f"#/$defs/{name}"}}} for name in "ab"
    }
    branches = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    fits, lost = fit_copy({"$defs": parts, "oneOf": branches})
    assert (fits, lost) == ({"$defs": parts, "anyOf": branches}, [("oneOf", "#")])


def _doubling(name: str, levels: int, last: object) -> dict[str, Any]:
    """Return objects of which each has two properties of the next kind."""
    parts: dict[str, Any] = {
        f"{name}{at}": {
            "type": "object",
            "required": ["x", "y"],
            "properties": {key: {"$ref": f"#/$defs/{name}{at + 1}"} for key in "xy"},
        }
        for at in range(levels)
    }
    return parts | {f"{name}{levels}": last}


def test_comparing_branches_ends_where_references_double() -> None:
    parts = _doubling("a", 40, TEXT) | _doubling("b", 40, TEXT)
    schema = {"$defs": parts, "oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]}
    assert [each.keyword for each in fit(schema)] == ["oneOf"]


def test_finding_the_objects_ends_where_references_double() -> None:
    parts: dict[str, Any] = {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(40)}
    found = of_objects({"$defs": parts | {"a40": CITY}, "$ref": "#/$defs/a0"})
    assert found["type"] == "object"


def test_many_addresses_are_not_tried_from_each_other() -> None:
    def fit_many(size: int) -> None:
        named = {f"a{at}": {"$id": f"i{at}"} for at in range(size // 16)}
        refs = {f"p{at}": {"$ref": f"z{at}"} for at in range(size // 16)}
        assert len(fit({"$defs": named, "properties": refs})) == len(refs)

    assert not grows_too_fast(fit_many)
