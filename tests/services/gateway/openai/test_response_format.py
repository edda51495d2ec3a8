import json
from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.openai.body_reader import BodyReader, read_response_format, sampling_params
from tokenloom.services.gateway.openapi.request_schemas import CommonFields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_formats_without_a_constraint() -> None:
    assert read_response_format(None) is None
    assert read_response_format({"type": "text"}) is None
    params, lost = sampling_params({"response_format": {"type": "text"}})
    assert (params.HasField("structured_outputs"), lost) == (False, ())


def test_any_object_and_a_schema() -> None:
    assert sampling_params({"response_format": {"type": "json_object"}})[0].structured_outputs.json_object
    wrapped = {"name": "a", "strict": True, "schema": SCHEMA}
    params, _ = sampling_params({"response_format": {"type": "json_schema", "json_schema": wrapped}})
    assert json.loads(params.structured_outputs.json) == SCHEMA


def test_an_object_with_a_schema_follows_it() -> None:
    params, _ = sampling_params({"response_format": {"type": "json_object", "schema": SCHEMA}})
    assert json.loads(params.structured_outputs.json) == SCHEMA


TAGS = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": TAGS}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": TAGS}}, "response_format"),
        ({"structured_outputs": {"json": TAGS}}, "structured_outputs"),
    ],
)
def test_a_keyword_that_no_grammar_expresses_is_left_out_and_named(body: Any, name: str) -> None:
    params, lost = sampling_params(body)
    assert lost == (f"{name}#/properties/tags/uniqueItems",)
    assert "uniqueItems" not in params.structured_outputs.json


def test_a_strict_schema_is_enforced_whole_or_refused() -> None:
    wrapped = {"name": "a", "schema": TAGS, "strict": True}
    with pytest.raises(InvalidArgument, match="uniqueItems at #/properties/tags") as caught:
        sampling_params({"response_format": {"type": "json_schema", "json_schema": wrapped}})
    assert caught.value.field == "response_format"


@pytest.mark.parametrize(
    "value",
    [
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"type": "structural_tag", "structures": [{"begin": "<f", "schema": SCHEMA, "end": ">"}], "triggers": ["<f"]},
    ],
)
def test_structural_tags(value: Any) -> None:
    params, _ = sampling_params({"response_format": value})
    assert json.loads(params.structured_outputs.structural_tag) == value


@pytest.mark.parametrize(
    "value",
    [
        "json_object",
        {},
        {"type": "structural_tag"},
        {"type": "structural_tag", "structures": [], "triggers": ["<f"]},
        {"type": "structural_tag", "format": {"type": "const_string"}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": {"enum": list(range(2000))}}},
        {"type": "json_object", "schema": "a"},
    ],
)
def test_errors_name_the_field(value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sampling_params({"response_format": value})
    assert caught.value.field == "response_format"


def test_one_constraint_is_enough() -> None:
    body = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(InvalidArgument, match="cannot be combined"):
        sampling_params(body)


def test_old_names_are_refused_with_the_new_one() -> None:
    with pytest.raises(InvalidArgument, match=r'structured_outputs: \{"regex"'):
        BodyReader(strict=False).read({"guided_regex": "a"}, CommonFields)
    BodyReader(strict=True).read({"guided_regex": None}, CommonFields)


def test_old_names_beside_the_new_one_have_no_effect() -> None:
    body = {"guided_regex": "a", "structured_outputs": {"regex": "b"}}
    reader = BodyReader(strict=True)
    reader.read(body, CommonFields)
    assert reader.ignored(body, CommonFields) == ("guided_regex",)
