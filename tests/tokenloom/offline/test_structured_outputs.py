import json

import pytest

from tokenloom import StructuredOutputsParams
from tokenloom.request.errors import InvalidArgument


def test_one_constraint_of_each_kind():
    schema = {"type": "object"}
    assert json.loads(StructuredOutputsParams(json=schema).to_wire().json) == schema
    assert StructuredOutputsParams(json="{}").to_wire().json == "{}"
    assert StructuredOutputsParams(regex="a+").to_wire().regex == "a+"
    assert list(StructuredOutputsParams(choice=["a", "b"]).to_wire().choice.texts) == ["a", "b"]
    assert StructuredOutputsParams(grammar="root ::= 'a'").to_wire().grammar == "root ::= 'a'"
    assert StructuredOutputsParams(json_object=True).to_wire().json_object


@pytest.mark.parametrize(
    "constraints",
    [{}, {"json_object": False}, {"json": "{}", "regex": "a"}, {"json": {"a": object()}}, {"regex": 3}],
)
def test_none_two_or_a_wrong_one_is_named(constraints):
    with pytest.raises(InvalidArgument, match="structured_outputs"):
        StructuredOutputsParams(**constraints).to_wire()
