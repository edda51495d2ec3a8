import json
import time
from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.output_constraints import (
    MAX_DEPTH,
    MAX_FORMATS,
    MAX_SOURCE_BYTES,
    check_structured_outputs,
    current_form,
    structural_tag_constraint,
)

SCHEMA = {"type": "object"}
TAG = {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}
LEGACY = {"structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def check(tag: object) -> None:
    check_structured_outputs(structural_tag_constraint(tag, "field"), "field")


def of(**found: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": found}


def test_both_forms_mean_the_same() -> None:
    for tag in (LEGACY, of(**TRIGGERED)):
        check(tag)
    found = json.loads(current_form(json.dumps(LEGACY)))["format"]
    assert found == {**TRIGGERED, "tags": [{"type": "tag", **TAG}]}
    assert json.loads(current_form(json.dumps(of(**TRIGGERED)))) == of(**TRIGGERED)


@pytest.mark.parametrize(
    "found",
    [
        {"type": "any_text"},
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "a+"}, {"type": "grammar", "grammar": "x"}]},
        {"type": "or", "elements": [{"type": "const_string", "value": "x"}]},
        {"type": "tag", "begin": {"type": "token", "token": 3}, "content": {"type": "any_text"}, "end": ["a", "b"]},
        {"type": "tags_with_separator", "tags": [TAG], "separator": ","},
        {"type": "json_schema", "json_schema": True},
        {"type": "optional", "content": TRIGGERED},
    ],
)
def test_the_formats_of_xgrammar_pass(found: dict[str, Any]) -> None:
    check(of(**found))


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object of type"),
        ({"type": "json_schema", "format": {}}, "must be an object of type"),
        ({"type": "structural_tag"}, "either format, or structures and triggers"),
        ({**LEGACY, "format": TRIGGERED}, "either format, or structures and triggers"),
        ({**LEGACY, "structures": "x"}, "structures must be a list"),
        ({**LEGACY, "structures": []}, "at least one of tags"),
        ({**LEGACY, "triggers": []}, "triggers must be a list of texts"),
        ({**LEGACY, "triggers": ["<g"]}, "must start with one of the triggers"),
        ({**LEGACY, "structures": [{"begin": "<f", "schema": 5, "end": ""}]}, "schema .* must be an object"),
        ({**LEGACY, "structures": [{"begin": "<f", "schema": SCHEMA}]}, "begin and end of a tag must be texts"),
        (of(type="xml"), "type of a format must be one of const_string"),
        ({"format": []}, "must be an object with a type"),
        (of(type="regex"), "pattern of the format regex"),
        (of(type="sequence", elements=[]), "at least one of elements"),
        (of(type="triggered_tags", triggers=["<f"], tags=[{"type": "regex", "begin": "<f", "pattern": "a"}]), "be tag"),
        (of(type="or", elements=[{"type": "const_string", "value": "x"}] * MAX_FORMATS), "at most 512 formats"),
        (of(type="json_schema", json_schema={"enum": list(range(1001))}), "1001 values"),
        (of(type="const_string", value="x" * MAX_SOURCE_BYTES), "at most 32768"),
        ("[" * 30_000, "nested more than 32 levels"),
    ],
)
def test_what_is_wrong_is_named(tag: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        check(tag)
    assert caught.value.field == "field"


def test_depth_is_limited() -> None:
    found: dict[str, Any] = {"type": "any_text"}
    for _ in range(MAX_DEPTH):
        found = {"type": "optional", "content": found}
    with pytest.raises(InvalidArgument, match="nested more than"):
        check(of(**found))


def test_a_check_takes_little_time() -> None:
    """Whatever 32 KiB hold: quotes, brackets and escapes."""
    used = time.process_time()
    for part in ('"', '\\"', "[", "{", '["', '"\\\\', "[1,"):
        with pytest.raises(InvalidArgument):
            check((part * MAX_SOURCE_BYTES)[:MAX_SOURCE_BYTES])
    assert time.process_time() - used < 1
