"""Past turns of the assistant: whatever an answer was, it is accepted as history."""

import json
from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.openai.chat import read_chat

USER = {"role": "user", "content": "hi"}


def read(**turn: Any) -> Any:
    """The turn as the template gets it."""
    return json.loads(read_chat([USER, {"role": "assistant", **turn}]).messages_json)[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": 2.5}]}', {"a": [1, {"b": 2.5}]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": "Par', '{"a": "Par'),
        ("[]", "[]"),
        ("5", "5"),
        (["a"], '["a"]'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "x\ny"}', '{"a": "x\ny"}'),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}'),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_that_are_no_object_are_a_text(arguments: object, expected: object) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    assert read(content=None, tool_calls=calls)["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    "turn",
    [{"content": None, "reasoning": "Hm."}, {"reasoning_content": "Hm."}, {"content": [], "reasoning": "Hm."}],
    ids=["null", "none", "no parts"],
)
def test_a_turn_that_only_reasoned(turn: dict[str, Any]) -> None:
    assert read(**turn) == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


@pytest.mark.parametrize("content", [None, []])
def test_a_tool_that_returned_nothing_and_a_user_who_said_nothing(content: object) -> None:
    chat = read_chat([USER, {"role": "tool", "tool_call_id": "c", "content": content}])
    assert json.loads(chat.messages_json)[1]["content"] == ""
    with pytest.raises(InvalidArgument) as caught:
        read_chat([{"role": "user", "content": content}])
    assert caught.value.field == "messages[0].content"
