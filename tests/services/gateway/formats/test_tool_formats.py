"""Tool calls in every format: what is a call, what is text, and that it does not matter in which pieces they come."""

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.request.tool_format import FORMATS, REQUIRED
from tokenloom.services.gateway.formats.call_parser import ToolParser, new_call_id, open_parser
from tokenloom.services.gateway.formats.message_parts import CallArguments, CallBegin, Content, ToolPart
from tokenloom.services.gateway.formats.strict_calls import NamedCall
from tokenloom.services.gateway.formats.tool_request import Tool

Parsed = tuple[str, list[tuple[str, str]]]
"""The text, and each call's name and arguments."""
NAMES = ("get_weather", "add", "f")
TOOLS = [Tool(name, {}, {}) for name in NAMES]
CALL = '{"name": "add", "arguments": {"a": 1, "b": "}]\\"x"}}'
ARGUMENTS = '{"a": 1, "b": "}]\\"x"}'


def parser_of(name: str) -> ToolParser:
    if name == "named":
        return NamedCall("f")
    return open_parser(REQUIRED if name == "required" else FORMATS[name], TOOLS)


def parsed(parser: ToolParser, pieces: Sequence[str]) -> Parsed:
    parts: list[ToolPart] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.finish()
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Content(words):
                text += words
            case CallBegin(name):
                calls.append((name, ""))
            case CallArguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


EXAMPLES: list[tuple[str, str, Parsed]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", [("add", ARGUMENTS)])),
    ("hermes", f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", ("Let me see.", [("add", ARGUMENTS)])),
    (
        "hermes",
        f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "f"}}\n</tool_call>',
        ("", [("add", ARGUMENTS), ("f", "{}")]),
    ),
    ("hermes", "no call < here, <tool> \n", ("no call < here, <tool> \n", [])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', ("", [("f", '{"a": [1, ')])),  # cut off
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=a>\n{"b": ["two words", {"c": 12',
        ("", [("f", '{"a": {"b": ["two words", {"c": ')]),
    ),
    ("hermes", '<tool_call>{"name": "f', ("", [])),  # cut before its name: no text for the user
    ("hermes", "Well.<tool_call>\n{", ("Well.", [])),
    ("hermes", '<tool_call>{"name": "f"', ("", [("f", "")])),
    ("hermes", '<tool_call>{"name": "f\\ud83d", "arguments": "\\ud83d"}', ("", [("f\ufffd", "\ufffd")])),
    ("hermes", "<tool_call>none</tool_call>", ("<tool_call>none</tool_call>", [])),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', ('<tool_call>{"x": 1}</tool_call>', [])),
    ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", ("", [("add", ARGUMENTS)] * 2)),  # never closed
    ("hermes", f"<tool_call>{CALL}</tool_call> and more", (" and more", [("add", ARGUMENTS)])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "add", "parameters": {"a": 2}}',
        ("", [("f", "{}"), ("add", '{"a": 2}')]),
    ),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', ('{"name": "Ada", "parameters": {}}', [])),  # no such tool
    ("llama3_json", ' {"answer": 42} is it', (' {"answer": 42} is it', [])),
    ("llama3_json", '{"name": "get_we', ("", [])),
    ("llama3_json", '<|python_tag|>{"na', ("", [])),
    ("llama3_json", '{"name": "Ad', ('{"name": "Ad', [])),  # of an answer in JSON
    ("llama3_json", '{"na', ('{"na', [])),
    ("llama3_json", "It is {}.", ("It is {}.", [])),
    ("llama3_json", "<|py", ("<|py", [])),
    ("mistral", f"[TOOL_CALLS][{CALL}]", ("", [("add", ARGUMENTS)])),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", ("", [("add", ARGUMENTS)] * 2)),
    ("mistral", 'Well. [TOOL_CALLS]f{"a": 1}', ("Well.", [("f", '{"a": 1}')])),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]add[CALL_ID]a1[ARGS]{"a": {}}',
        ("", [("f", "{}"), ("add", '{"a": {}}')]),
    ),
    ("mistral", "[TOOL_CALLS]what is this?", ("[TOOL_CALLS]what is this?", [])),
    ("mistral", "[TOOL_CALLS]f[ARGS]", ("", [])),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]a1[AR", ("", [])),
    ("mistral", "Well. [TOOL_CALLS] ", ("Well.", [])),
    ("mistral", '[TOOL_CALLS] [{"na', ("", [])),
    ("mistral", "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
    ("mistral", "[TOOL", ("[TOOL", [])),
    ("required", f"[{CALL}, {CALL}]", ("", [("add", ARGUMENTS)] * 2)),
    ("required", '[{"name": "f", "parameters": {"a": ', ("", [("f", '{"a": ')])),
    ("required", '[{"name": "get', ("", [])),
    ("required", f'[{CALL}, {{"na', ("", [("add", ARGUMENTS)])),
    ("named", ARGUMENTS, ("", [("f", ARGUMENTS)])),
    ("named", "", ("", [("f", "")])),
]


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_calls_and_text(name: str, text: str, expected: Parsed) -> None:
    assert parsed(parser_of(name), [text]) == expected
    assert parsed(parser_of(name), list(text)) == expected


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(
    lambda name, arguments, key, indent: json.dumps({"name": name, key: arguments}, indent=indent),
    st.sampled_from(NAMES),
    st.dictionaries(st.text(), values, max_size=3),
    st.sampled_from(("arguments", "parameters")),
    st.sampled_from((None, 1)),
)
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "[ARGS]",
    "f",
    "[",
    "]",
    ", ",
    "; ",
    "\n",
    "{",
)
outputs = st.lists(calls | st.sampled_from(MARKS) | st.text(max_size=5), max_size=8).map("".join)


@st.composite
def cut_outputs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and the same in pieces; it may end anywhere."""
    text = draw(outputs)
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", [*FORMATS, "required", "named"])
@settings(max_examples=60)  # for each of five
@given(cut=cut_outputs())
def test_pieces_do_not_matter(name: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    assert parsed(parser_of(name), pieces) == parsed(parser_of(name), [text])


@settings(max_examples=50)
@given(calls=st.lists(calls, min_size=1, max_size=3))
def test_the_calls_written_are_the_calls_found(calls: list[str]) -> None:
    written = {
        "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
        "llama3_json": "; ".join(calls),
        "mistral": f"[TOOL_CALLS][{', '.join(calls)}]",
        "required": f"[{', '.join(calls)}]",
    }
    for name, text in written.items():
        words, found = parsed(parser_of(name), [text])
        assert not words
        assert [(each, json.loads(arguments)) for each, arguments in found] == [
            (call["name"], call.get("arguments", call.get("parameters"))) for call in map(json.loads, calls)
        ]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@settings(max_examples=50)
@given(text=st.text())
def test_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert parsed(parser_of(name), list(text)) == (text, [])


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of("hermes")
    assert parser.feed('<tool_call>{"name": "f", "argu') == [CallBegin("f")]
    assert parser.feed('ments": {"a"') == [CallArguments('{"a"')]
    assert parser.feed(": 1}") == [CallArguments(": 1}")]
    assert parser.feed("}</tool_call>") == []


def test_ids_are_as_templates_want_them() -> None:
    assert new_call_id(FORMATS["hermes"], "f", Random(1)).startswith("call_")
    mistral = new_call_id(FORMATS["mistral"], "f", Random(1))
    assert len(mistral) == 9
    assert mistral.isalnum()
