"""Turns of gpt-oss: reasoning, text and calls, whatever pieces they come in; written by the format's description
(github.com/openai/harmony, docs/format.md)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.reasoning import FORMATS as REASONING_FORMATS
from tokenloom.request.reasoning import HARMONY
from tokenloom.request.tool_format import FORMATS
from tokenloom.services.gateway.assistant.message_plans import (
    MessagePlan,
    MessagePlans,
    ParsedMessage,
    calls_of,
    reasoning_of,
    text_of,
)
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.think import opener
from tokenloom.services.gateway.formats.tool_request import Tool, ToolChoice, ToolRequest
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1 import types_pb2

THOUGHT = "<|channel|>analysis<|message|>The user asks.\nHm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "}]"}'
ARGUMENTS = '{"a": 1, "b": "}]"}'
Said = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, text, and each call's name and arguments."""


def plans() -> MessagePlans:
    return MessagePlans(FORMATS["openai"], REASONING_FORMATS["openai_gptoss"])


def generate_request() -> GenerateRequest:
    sampling = types_pb2.SamplingParams()
    return GenerateRequest(prompts=["hi"], prompt_field="messages", sampling=sampling, tenant=NO_TENANT)


def plan(choice: ToolChoice = ToolChoice.AUTO) -> MessagePlan:
    request = ToolRequest([Tool("add", {}, {"function": {"name": "add", "parameters": {}}})], choice)
    found, _ = plans().apply(request, generate_request(), include_reasoning=True)
    assert found is not None
    return found


def said(plan: MessagePlan, pieces: Sequence[str], *, is_open: bool = False) -> Said:
    message = ParsedMessage(plan, reasoning_is_open=is_open)
    deltas = [message.feed(piece, ends=False) for piece in pieces] + [message.feed("", ends=True)]
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in calls_of(delta)):
        if call.name:
            calls.append((call.name, ""))
        calls[-1] = calls[-1][0], calls[-1][1] + call.arguments
    return "".join(map(reasoning_of, deltas)), "".join(map(text_of, deltas)), calls


EXAMPLES: list[tuple[str, Said]] = [
    (f"{THOUGHT}<|channel|>final<|message|>It is 3.<|return|>", ("The user asks.\nHm.", "It is 3.", [])),
    (f"{THOUGHT}<|channel|>final<|message|>It is 3.", ("The user asks.\nHm.", "It is 3.", [])),  # its end is no text
    ("<|channel|>final<|message|>a < b, <|b", ("", "a < b, <|b", [])),
    (f"{THOUGHT}{CALL}<|call|>", ("The user asks.\nHm.", "", [("add", ARGUMENTS)])),
    (f"{THOUGHT}{CALL}", ("The user asks.\nHm.", "", [("add", ARGUMENTS)])),
    # As templates write past calls: the recipient stands before the channel.
    (" to=functions.add<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("add", "{}")])),
    # A word before the call is for the user.
    (
        f"{THOUGHT}<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{CALL}<|call|>",
        ("The user asks.\nHm.", "I add.", [("add", ARGUMENTS)]),
    ),
    (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", ("", "", [("add", ARGUMENTS)] * 2)),
    # Two messages of a channel are two paragraphs.
    (f"{THOUGHT}<|channel|>analysis<|message|>Again.<|end|>", ("The user asks.\nHm.\nAgain.", "", [])),
    # Another tool's recipient is none of the request's functions.
    ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    # An end that is missing.
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", ("Hm.", "Yes.", [])),
    # Cut within a header, within reasoning, within arguments.
    (f"{THOUGHT}<|channel|>fin", ("The user asks.\nHm.", "", [])),
    ("<|channel|>analysis<|message|>The us", ("The us", "", [])),
    ('<|channel|>commentary to=functions.add<|message|>{"a": [', ("", "", [("add", '{"a": [')])),
    # Without any header all is text.
    ("Plain words.", ("", "Plain words.", [])),
    ("t", ("", "t", [])),
    ("", ("", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), EXAMPLES)
def test_examples(text: str, expected: Said) -> None:
    assert said(plan(), [text]) == expected
    assert said(plan(), list(text)) == expected
    has_header = text.lstrip().startswith(("<|", "to="))
    reasoning, content, calls = expected
    inside = expected if has_header else (content, reasoning, calls)
    assert said(plan(), [text], is_open=True) == inside
    assert said(plan(), list(text), is_open=True) == inside


MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
WORDS = ("assistant", "analysis", "final", "commentary", " to=functions.f", "to=", '{"a":1}', "{", "<", "<|", " ", "\n")


@given(pieces=st.lists(st.sampled_from(MARKS + WORDS) | st.text(max_size=3), max_size=24), is_open=st.booleans())
def test_pieces_do_not_matter(pieces: list[str], is_open: bool) -> None:
    text = "".join(pieces)
    whole = said(plan(), [text], is_open=is_open)
    assert said(plan(), pieces, is_open=is_open) == whole
    assert said(plan(), list(text), is_open=is_open) == whole


@pytest.mark.parametrize("cut", range(len(THOUGHT + CALL) + 1))
def test_a_call_is_complete_when_its_arguments_are(cut: int) -> None:
    message = ParsedMessage(plan(), reasoning_is_open=False)
    text = THOUGHT + CALL
    message.feed(text[:cut], ends=False)
    begins = len(text) - len(ARGUMENTS)
    assert message.is_within_call == (begins <= cut < len(text))


def test_a_forbidden_call_is_text_and_its_beginning_is_forbidden() -> None:
    assert said(plan(ToolChoice.NONE), [CALL]) == ("", ARGUMENTS, [])
    assert FORMATS["openai"].openings == (" to=functions.",)


def test_a_forced_call_is_what_the_answer_says() -> None:
    forced = plan(ToolChoice.REQUIRED)
    answer = f'[{{"name": "add", "parameters": {ARGUMENTS}}}]'
    assert said(forced, [f"{THOUGHT}<|channel|>final<|message|>{answer}"])[2] == [("add", ARGUMENTS)]


def test_reasoning_that_is_treated_as_text() -> None:
    only_tools = MessagePlan(open_tools=lambda: open_parser(FORMATS["openai"], []))
    assert said(only_tools, [f"{THOUGHT}{CALL}"]) == ("", "The user asks.\nHm.", [("add", ARGUMENTS)])


def test_special_marks_stay_in_the_text_that_is_parsed() -> None:
    found = MessagePlans(reasoning=HARMONY, special_marks=frozenset(["<|channel|>", "<|message|>"]))
    request = generate_request()
    found.apply(ToolRequest(), request, include_reasoning=True)
    assert not request.text.skip_special_tokens


def test_the_name_chooses_the_parser() -> None:
    parts = opener(REASONING_FORMATS["openai_gptoss"])(True).feed("Hm.<|end|>")
    assert [type(part).__name__ for part in parts] == ["ReasoningText"]
