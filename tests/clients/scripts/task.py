"""The task that clients of a scripted model finish: ask for the weather, call the tool, report its result."""

from typing import Any

QUESTION = "What is the weather in Oslo?"
NAME = "get_weather"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
RESULT = "It rains."


def get_weather(city: str) -> str:
    """The function that the model calls."""
    assert city == "Oslo"
    return RESULT


def check(text: str) -> None:
    """Fail unless the model has read the tool's result."""
    assert RESULT in text, text
