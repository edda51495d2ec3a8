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
    assert not sampling_params({"response_format": {"type": "text"}}).HasField("structured_outputs")


def test_any_object_and_a_schema() -> None:
    assert sampling_params({"response_format": {"type": "json_object"}}).structured_outputs.json_object
    wrapped = {"name": "a", "strict": True, "schema": SCHEMA}
    params = sampling_params({"response_format": {"type": "json_schema", "json_schema": wrapped}})
    assert json.loads(params.structured_outputs.json) == SCHEMA


@pytest.mark.parametrize(
    "value",
    [
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"type": "structural_tag", "structures": [{"begin": "<f", "schema": SCHEMA, "end": ">"}], "triggers": ["<f"]},
    ],
)
def test_structural_tags(value: Any) -> None:
    assert json.loads(sampling_params({"response_format": value}).structured_outputs.structural_tag) == value


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
    ],
)
def test_errors_name_the_field(value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_response_format(value)
    assert caught.value.field == "response_format"


def test_one_constraint_is_enough() -> None:
    body = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(InvalidArgument, match="cannot be combined"):
        sampling_params(body)


def test_old_names_are_refused_with_the_new_one() -> None:
    with pytest.raises(InvalidArgument, match=r'structured_outputs: \{"regex"'):
        BodyReader(strict=False).read({"guided_regex": "a"}, CommonFields)
    BodyReader(strict=True).read({"guided_regex": None}, CommonFields)
