"""Tests what is read from templates about outputs."""

import pytest
from msgspec.structs import replace

from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.tool_format import FORMATS, from_json, to_json
from tokenloom.services.tokenizer.output_format import described, special_marks, tool_call_parser

LOOP = "{% for call in message.tool_calls %}"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (LOOP + "<tool_call>\n{{ call }}\n</tool_call>", "hermes"),
        (LOOP + "[TOOL_CALLS]{{ call }}", "mistral"),
        (LOOP + "{{ call.id }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("<|start_header_id|>" + LOOP, "llama3_json"),
        (LOOP + "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json", "openai"),
        ("<tool_call>", ""),  # no calls are written
        (LOOP + "<tool_call>[TOOL_CALLS]", ""),  # not clear
        (LOOP + "<tool_call><function={{ call.name }}>", ""),  # a format of its own
        ("", ""),
    ],
)
def test_tool_call_parser(template: str, parser: str) -> None:
    assert tool_call_parser(template) == parser


def test_the_demo_model() -> None:
    template = CheckpointInfo.load(DEMO_MODEL).chat_template
    assert tool_call_parser(template) == "hermes"


def test_marks_of_a_derived_format_are_kept_if_they_are_special() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    form = replace(FORMATS["kimi_k2"], keeps_special_tokens=False)
    assert not from_json(described(to_json(form), tokenizer)).keeps_special_tokens
    tokenizer.add_special_tokens(["<|tool_call_end|>"])
    assert from_json(described(to_json(form), tokenizer)).keeps_special_tokens
    assert described(b"", tokenizer) == b""


def test_marks_that_are_special_tokens() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL)
    assert special_marks(tokenizer) == []
    tokenizer.add_special_tokens(["<think>", "</think>", "<|other|>"])
    assert special_marks(tokenizer) == ["<think>", "</think>"]
