"""Tools of type ``mcp``: names, filters, approvals, headers and choices."""

from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.responses.mcp_tools import (
    CallOutcome,
    Listing,
    McpFunction,
    McpTool,
    chosen,
    loosened,
    read_mcp_tool,
    shown,
)

LISTED: list[dict[str, Any]] = [
    {
        "name": "read",
        "description": "Reads.",
        "input_schema": {"type": "object"},
        "annotations": {"readOnlyHint": True},
    },
    {"name": "write", "description": None, "input_schema": {"type": "object"}, "annotations": None},
]


def read(takes_headers: bool = True, **members: Any) -> McpTool:
    tool = {"type": "mcp", "server_label": "s", **members}
    return read_mcp_tool("tools[0]", tool, "server", takes_headers=takes_headers)


@pytest.mark.parametrize(
    ("require", "asking"),
    [
        (None, {"read", "write"}),
        ("always", {"read", "write"}),
        ("never", set()),
        ({"never": {"tool_names": ["read"]}}, {"write"}),
        ({"never": {"read_only": True}}, {"write"}),
        ({"always": {"tool_names": ["write"]}, "never": {"tool_names": ["read"]}}, {"write"}),
        ({"always": {"tool_names": ["write"]}}, {"read", "write"}),
        ({"always": {"tool_names": ["read"]}, "never": {"read_only": True}}, {"read", "write"}),
    ],
)
def test_which_tools_need_approval(require: object, asking: set[str]) -> None:
    functions = [function for function, _ in read(require_approval=require).functions(Listing(LISTED))]
    assert {function.tool for function in functions if function.needs_approval} == asking


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["read", "write"]),
        (["write"], ["write"]),
        ({"read_only": True}, ["read"]),
        ({"read_only": False}, ["write"]),
    ],
)
def test_which_tools_are_allowed(allowed: object, names: list[str]) -> None:
    functions = read(allowed_tools=allowed).functions(Listing(LISTED))
    assert [function.tool for function, _ in functions] == names
    assert all(definition["function"]["name"] == f"s.{function.tool}" for function, definition in functions)


def test_a_name_that_functions_cannot_have() -> None:
    assert McpFunction("my label", "a/b").name == "my_label.a_b"
    long = McpFunction("label", "x" * 100), McpFunction("label", "x" * 101)
    assert all(len(each.name) == 64 for each in long)
    assert long[0].name != long[1].name


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"server_label": ""}, "server_label"),
        ({"require_approval": "sometimes"}, "require_approval"),
        ({"require_approval": {"always": 3}}, "require_approval.always"),
        ({"allowed_tools": [1]}, "allowed_tools"),
        ({"headers": []}, "headers"),
        ({"headers": ["a"]}, "headers"),
        ({"headers": {"Host": "other"}}, "headers"),
        ({"headers": {"Mcp-Session-Id": "other's"}}, "headers"),
        ({"headers": {"X-A": "a\r\nHost: other"}}, "headers"),
        ({"headers": {"X A": "a"}}, "headers"),
        ({"headers": {"X-A": 3}}, "headers"),
        ({"headers": {f"X-{number}": "a" for number in range(33)}}, "headers"),
        ({"authorization": "a\nb"}, "headers"),
    ],
)
def test_what_is_wrong_is_named(members: dict[str, Any], field: str) -> None:
    if members == {"headers": []}:
        assert read(**members).headers == {}  # empty, as absent
        return
    with pytest.raises(InvalidArgument) as caught:
        read(**members)
    assert caught.value.field == f"tools[0].{field}"


def test_headers_that_are_not_taken_are_not_read() -> None:
    assert read(takes_headers=False, headers={"Host": "other"}, authorization="secret").headers == {}


def test_a_response_repeats_no_secret() -> None:
    tools = [{"type": "mcp", "server_label": "s", "headers": {"a": "b"}, "authorization": "c"}, {"type": "function"}]
    assert shown(tools) == [{"type": "mcp", "server_label": "s"}, {"type": "function"}]


FUNCTIONS = [McpFunction("s", "read"), McpFunction("s", "write"), McpFunction("t", "read")]
READ = {"type": "function", "function": {"name": "s.read"}}
WRITE = {"type": "function", "function": {"name": "s.write"}}


MCP = {"type": "mcp", "server_label": "s"}


@pytest.mark.parametrize(
    ("choice", "first", "later"),
    [
        ("auto", "auto", "auto"),
        ("none", "none", "none"),
        ("required", "required", "auto"),
        ({**MCP, "name": "read"}, READ, "auto"),
        (
            MCP,
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [READ, WRITE]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ, WRITE]}},
        ),
        ({"type": "mcp", "server_label": "none"}, "auto", "auto"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [READ, {"type": "mcp", "server_label": "s", "name": "write"}],
                },
            },
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ, WRITE]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ, WRITE]}},
        ),
    ],
)
def test_a_choice_in_the_first_round_and_later(choice: object, first: object, later: object) -> None:
    found = chosen(choice, FUNCTIONS)
    assert (found, loosened(found)) == (first, later)


def test_what_the_model_reads_of_an_error() -> None:
    assert CallOutcome(error={"message": "gone"}).text == "Error: gone"
    assert CallOutcome("it said so", {"type": "mcp_tool_execution_error"}).text == "it said so"
    assert CallOutcome("").text == ""
