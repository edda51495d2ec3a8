"""Strict tools: their arguments are bound once the model begins a call by itself."""

import json
from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.tool_format import FORMATS
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.message_parts import CallArguments, CallBegin
from tokenloom.services.gateway.formats.strict_calls import strict_constraint
from tokenloom.services.gateway.formats.tool_request import ToolRequest, read_tool_request

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def asked(*tools: dict[str, Any], choice: str = "auto", parallel: bool = True) -> ToolRequest:
    return read_tool_request(list(tools), choice, parallel)


def form_of(parser: str, request: ToolRequest) -> Any:
    """Return the format of the structural tag, or None without one."""
    constraint = strict_constraint(request, FORMATS[parser])
    return None if constraint is None else json.loads(constraint.structural_tag)["format"]


def test_a_call_is_bound_to_the_schema_of_its_tool() -> None:
    form = form_of("hermes", asked(tool("strict", strict=True), tool("free")))
    bound, free = form["tags"]
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert bound["begin"] == '<tool_call>\n{"name": "strict", "arguments": '
    assert bound["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert bound["end"] == "}\n</tool_call>"
    assert free["content"]["json_schema"] == {"type": "object"}


def test_llamas_calls_have_their_own_marks() -> None:
    form = form_of("llama3_json", asked(tool("strict", strict=True), parallel=False))
    assert form["tags"][0]["begin"] == '{"name": "strict", "parameters": '
    assert form["stop_after_first"]


@pytest.mark.parametrize("request_", [asked(tool("free")), asked(tool("a", strict=True), choice="required")])
def test_nothing_is_bound(request_: ToolRequest) -> None:
    assert form_of("hermes", request_) is None


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_the_parser_reads_what_the_marks_enclose(parser: str) -> None:
    request = asked(tool("weather", strict=True))
    tag = form_of(parser, request)["tags"][0]
    reader = open_parser(FORMATS[parser], request.tools)
    parts = [*reader.feed(f'{tag["begin"]}{{"city": "Oslo"}}{tag["end"]}'), *reader.finish()]
    assert parts[0] == CallBegin("weather")
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(arguments) == {"city": "Oslo"}


def test_a_schema_beyond_the_limits_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidArgument) as refused:
        form_of("hermes", asked({"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}}))
    assert refused.value.field == "tools[0].function.parameters"
