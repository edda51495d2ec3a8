import json
from typing import Any

import pytest

from tests.linear_time import grows_too_fast
from tokenloom.request.tool_format import FORMATS
from tokenloom.services.gateway.formats.call_arguments import raw_arguments, read_arguments
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.message_parts import CallArguments
from tokenloom.services.gateway.formats.tool_request import Tool


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"code": "x\ny\tz"}', {"code": "x\ny\tz"}),
        ('{"a": NaN, "b": -Infinity, "c": 1e400}', {"a": "NaN", "b": "-Infinity", "c": "1e400"}),
        ('{"a": [1, 2,],\n}', {"a": [1, 2]}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"a": "\\ud83d\\ude00", "b": NaN}', {"a": "\U0001f600", "b": "NaN"}),
        ("{'a': True, 'b': None, 'c': 'it\\'s \"x\"'}", {"a": True, "b": None, "c": 'it\'s "x"'}),
        ('{city: "Paris", n: 0x1F}', {"city": "Paris", "n": "0x1F"}),
        ('{"path": "C:\\dir", "quote": "\\\'"}', {"path": "C:\\dir", "quote": "'"}),
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        (r"""{'a': 'say \"hi\" to \\'}""", {"a": 'say "hi" to \\'}),
    ],
)
def test_malformed_arguments_are_read_as_what_they_must_mean(text: str, arguments: object) -> None:
    assert read_arguments(text, is_cut=True) == arguments


@pytest.mark.parametrize("text", ["[1]", '"Paris"', "5", "null", '{"a" 1}', '{"a": "b" "c"}', '{"a": 1}{"b": 2}'])
def test_no_input_is_invented(text: str) -> None:
    arguments = read_arguments(text, is_cut=True)
    assert arguments == {"INVALID_JSON": text}
    assert raw_arguments(arguments) == text


@pytest.mark.parametrize("text", ["", '{"a": 1', '{"a": "x', "[1,"])
def test_what_was_cut_is_empty(text: str) -> None:
    assert read_arguments(text, is_cut=True) == {}


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": "x', "[1,"])
def test_what_ended_without_a_word_of_it_is_no_empty_input(text: str) -> None:
    assert read_arguments(text, is_cut=False) == {"INVALID_JSON": text}


def test_a_call_without_arguments_has_none() -> None:
    assert read_arguments(" ", is_cut=False) == {}


@pytest.mark.parametrize("begin", ["{'a': '" + r"\'", '{"a": "' + r"\"", "{'a': \"" + r"\'\"", "{'a': $$", "{'a': a$"])
def test_what_does_not_end_is_read_in_linear_time(begin: str) -> None:
    assert not grows_too_fast(lambda size: read_arguments(begin + begin[-2:] * size, is_cut=True))


def test_a_name_is_no_value() -> None:
    assert read_arguments('{"a": $b}', is_cut=True) == {"INVALID_JSON": '{"a": $b}'}


def test_what_would_take_long_to_mend_stays_whole() -> None:
    text = "{" + "a, " * 20_000 + "}"
    assert read_arguments(text, is_cut=True) == {"INVALID_JSON": text}
    assert read_arguments("{'a': '" + "x\n" * 100_000 + "'}", is_cut=True) == {"a": "x\n" * 100_000}


@pytest.mark.parametrize("arguments", [{}, {"INVALID_JSON": 1}, {"INVALID_JSON": "a", "b": 1}])
def test_other_arguments_stay(arguments: dict[str, Any]) -> None:
    assert raw_arguments(arguments) is arguments


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x\ny"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"a": "x\ny"}, "name": "f"}\n</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "x\ny"}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x\ny"}'),
    ],
)
def test_line_breaks_in_texts_are_written_as_json_has_them(parser: str, text: str) -> None:
    for size in (1, len(text)):
        reader = open_parser(FORMATS[parser], [Tool("f", {}, {})])
        parts = [part for at in range(0, len(text), size) for part in reader.feed(text[at : at + size])]
        parts += reader.finish()
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert json.loads(arguments) == {"a": "x\ny"}
