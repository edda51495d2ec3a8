"""Joins the events of a streamed answer, so that answers cut into other pieces compare equal."""

import json
from collections.abc import Iterable
from typing import Any

GROWING = ("text", "content", "arguments", "reasoning", "reasoning_content")


def join_events(events: Iterable[str]) -> dict[str, Any]:
    """Return choices by index and the usage. ``events``: with their ids, if they have any."""
    choices: dict[int, dict[str, Any]] = {}
    usage: list[Any] = []
    for event in events:
        data = json.loads(event[event.index("data: ") + 6 :])
        assert "error" not in data, data
        for choice in data["choices"]:
            join(choices.setdefault(choice["index"], {}), choice)
        if not data["choices"]:
            usage.append(data["usage"])
    return {"choices": choices, "usage": usage}


def join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the members of a piece: texts and lists grow; other members must be given once, or be equal."""
    for name, value in part.items():
        if name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                join(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            join(whole.setdefault(name, {}), value)
        elif isinstance(value, list):
            whole.setdefault(name, []).extend(value)
        elif isinstance(value, str) and name in GROWING:
            whole[name] = whole.get(name, "") + value
        elif value is not None:
            assert whole.get(name, value) == value, (name, whole[name], value)
            whole[name] = value
