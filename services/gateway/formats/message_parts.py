"""Defines the parts of an assistant's turn, and finds the markers between them in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


def find_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Return the text before the first marker, that marker, and what follows it.

    Without a marker: what is certainly text, an empty string, and what may be the beginning of a marker.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    longest = max(map(len, markers))
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return text[:start], "", text[start:]
    return text, "", ""


def begins_marker(text: str, marker: str) -> bool:
    """Return whether the text is an incomplete beginning of the marker."""
    return len(text) < len(marker) and marker.startswith(text)


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More arguments of the call that began last: JSON as the model writes it."""

    text: str


Part = Content | ReasoningText | CallBegin | CallArguments
ToolPart = Content | CallBegin | CallArguments
"""What the text after the reasoning may hold."""
TextPart = Content | ReasoningText
"""What is separated before the text is searched for tool calls."""
