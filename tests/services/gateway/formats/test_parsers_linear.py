"""Parsing a model's output takes linear time, whatever the model writes and in whatever pieces it arrives.

A model can be made to write anything, for as many tokens as its context holds.
"""

from collections.abc import Callable

import pytest

from tests.linear_time import grows_too_fast
from tokenloom.request.reasoning import FORMATS as REASONING_FORMATS
from tokenloom.request.tool_format import FORMATS, REQUIRED
from tokenloom.services.gateway.assistant.message_plans import MessagePlan, ParsedMessage
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.think import opener
from tokenloom.services.gateway.formats.tool_request import Tool

SMALL, LARGE = 1 << 12, 1 << 17
"""Characters. Copying a text is so fast that quadratic copying shows only in texts of this length."""
TOOLS = [Tool("f", {}, {})]
PIECE = 8
"""Characters in a streamed piece, about two tokens'."""
CASES = [
    *[("hermes", "", unit) for unit in (" ", "<tool_call>", "<tool_call>{}", "<")],
    *[("hermes", "<tool_call>", unit) for unit in (" ", "</tool_call>", "{")],
    ("hermes", '<tool_call>{"', "a"),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"', "a"),
    ("hermes", '<tool_call>{"arguments":{"a":"', "a"),
    ("hermes", "", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
    *[("llama3_json", "", unit) for unit in (" ", '{"name":"f","parameters":{}}; ', "<|python_tag|>")],
    *[("llama3_json", '{"name":"f"}', unit) for unit in (";", " ")],
    ("llama3_json", '{"parameters":"', "a"),
    *[("mistral", "", unit) for unit in (" ", "[TOOL_CALLS]", "[TOOL_CALLS]f{}", "[")],
    *[("mistral", "[TOOL_CALLS]", unit) for unit in (" ", "[", "a")],
    *[("mistral", "[TOOL_CALLS][", unit) for unit in (" ", ",")],
    ("mistral", '[TOOL_CALLS]f{"a":"', "a"),
    ("mistral", "", '[TOOL_CALLS][{"name":"f","arguments":{}}]'),
    *[("qwen3_coder", "", unit) for unit in ("<function=", "<tool_call>\n<function=f>\n</function>\n</tool_call>\n")],
    *[
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n", unit)
        for unit in ("a", "\n", "</parameter>", "</parameter>\n\n", "[1, ")
    ],
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=", "a"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n", "<parameter=a>\n1\n</parameter>\n"),
    *[("pythonic", "[f(a=", unit) for unit in ("[", "1", "'", "\\u00", " ", "(")],
    ("pythonic", "[", "f(a='x', b=[True]), "),
    *[("gemma4", "<|tool_call>call:f{a:", unit) for unit in ('<|"|>', "a", "{b:", "<|")],
    *[("kimi_k2", "<|tool_calls_section_begin|>", unit) for unit in (" ", "<|tool_call_begin|>", "functions.")],
    *[("openai", "", unit) for unit in (" ", "a", "<|channel|>", "<|message|>", "<")],
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a":"', "a"),
    ("openai", "", "<|channel|>analysis<|message|>a<|end|>"),
]
"""The format, what the output begins with, and what it repeats."""


def read(plan: MessagePlan, text: str, piece: int) -> None:
    message = ParsedMessage(plan, reasoning_is_open=False)
    for start in range(0, len(text), piece):
        message.feed(text[start : start + piece], ends=False)
    message.feed("", ends=True)


def is_slow(plan: MessagePlan, head: str, unit: str, piece: int) -> bool:
    def call(size: int) -> None:
        read(plan, head + unit * (size // len(unit)), piece or size)

    return grows_too_fast(call, SMALL, LARGE)


@pytest.mark.parametrize("piece", [PIECE, 0], ids=["streamed", "whole"])
@pytest.mark.parametrize(("name", "head", "unit"), CASES)
def test_a_parser_of_calls_takes_linear_time(name: str, head: str, unit: str, piece: int) -> None:
    plan = MessagePlan(open_tools=lambda: open_parser(FORMATS[name], TOOLS))
    assert not is_slow(plan, head, unit, piece)


@pytest.mark.parametrize("piece", [PIECE, 0], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("head", "unit"),
    [("", " "), ("[", " "), ("[", ","), ("[", "{}"), ("[", '{"name":"f","arguments":{}},'), ('[{"', "a")],
)
def test_the_parser_of_required_calls_takes_linear_time(head: str, unit: str, piece: int) -> None:
    assert not is_slow(MessagePlan(open_tools=lambda: open_parser(REQUIRED, TOOLS)), head, unit, piece)


@pytest.mark.parametrize("piece", [PIECE, 0], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("head", "unit"), [("", " "), ("", "<think>"), ("<think>", " "), ("<think>a", " "), ("<think>a", "\n</")]
)
def test_the_parser_of_reasoning_takes_linear_time(head: str, unit: str, piece: int) -> None:
    make: Callable[[bool], object] = opener(next(iter(REASONING_FORMATS.values())))
    assert not is_slow(MessagePlan(open_reasoning=make), head, unit, piece)  # type: ignore[arg-type]
