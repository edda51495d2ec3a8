import json

import pytest

from tokenloom import SamplingParams, StructuredOutputsParams
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_string_at_the_end_of_a_grammar_ends_only_its_own_request(make_llm, asynchronous):
    """The token that completes the text, and the end of the grammar, come with one step."""
    llm = make_llm(async_scheduling=asynchronous)
    constraint = StructuredOutputsParams(choice=["yes"])
    stopped = SamplingParams(max_tokens=20, ignore_eos=True, stop=["s"], structured_outputs=constraint)
    free = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    one, other = llm.generate(["Do you?", "The capital of France is"], [stopped, free], use_tqdm=False)
    assert (one.outputs[0].text, one.outputs[0].finish_reason, one.outputs[0].stop_reason) == ("ye", "stop", "s")
    assert len(other.outputs[0].token_ids) == 30


def test_a_keyword_that_no_grammar_expresses_is_left_out_and_logged(make_llm, caplog):
    constraint = StructuredOutputsParams(json={"type": "array", "items": {"type": "boolean"}, "uniqueItems": True})
    params = SamplingParams(max_tokens=40, temperature=0, structured_outputs=constraint)
    (answer,) = make_llm().generate(["Yes or no?"], params, use_tqdm=False)
    assert answer.outputs[0].text.lstrip().startswith("[")
    assert "structured_outputs#/uniqueItems" in caplog.text
