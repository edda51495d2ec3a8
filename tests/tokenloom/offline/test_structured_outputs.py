import json

import pytest

from tokenloom import StructuredOutputsParams
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.output_constraints import narrow_structured_outputs


def wire(**constraints):
    return narrow_structured_outputs(StructuredOutputsParams(**constraints))


def test_one_constraint_of_each_kind():
    schema = {"type": "object"}
    assert json.loads(wire(json=schema).json) == schema
    assert wire(json="{}").json == "{}"
    assert wire(regex="a+").regex == "a+"
    assert list(wire(choice=["a", "b"]).choice.texts) == ["a", "b"]
    assert wire(grammar="root ::= 'a'").grammar == "root ::= 'a'"
    assert wire(json_object=True).json_object


@pytest.mark.parametrize(
    "constraints",
    [{}, {"json_object": False}, {"json": "{}", "regex": "a"}, {"json": {"a": object()}}, {"regex": 3}],
)
def test_none_two_or_a_wrong_one_is_named(constraints):
    with pytest.raises(InvalidArgument, match="structured_outputs"):
        wire(**constraints)
