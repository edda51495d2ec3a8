"""Defines the parts of an assistant's turn, finds the markers between them in a text that arrives in pieces, and keeps
the text around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


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


class Expected(Enum):
    """What a text begins with, if it is none of the marks that are expected."""

    NO = auto()
    MAYBE = auto()
    """It may be the beginning of a mark."""


def expected(text: str, marks: Sequence[str]) -> str | Expected:
    """Return the longest of the marks with which a text begins."""
    if found := [mark for mark in marks if text.startswith(mark)]:
        longest = max(found, key=len)
        return longest if longest else Expected.NO
    return Expected.MAYBE if any(mark.startswith(text) for mark in marks) else Expected.NO


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
    call_id: str = ""
    """As the model has written it; empty if it writes none."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More arguments of the call that began last: JSON as the model writes it."""

    text: str


Part = Content | ReasoningText | CallBegin | CallArguments
ToolPart = Content | CallBegin | CallArguments
"""What the text after the reasoning may hold."""
TextPart = Content | ReasoningText
"""What is separated before the text is searched for tool calls."""


class Words:
    """Text around calls: space before a call is not content.

    Attributes:
        is_after_call: Whether nothing but space has come since a call.
    """

    def __init__(self) -> None:
        self._space: list[str] = []
        self.is_after_call = False

    def add(self, text: str) -> list[ToolPart]:
        words = text.rstrip()
        if not words:
            if text:
                self._space.append(text)
            return []
        content = Content("".join(self._space) + words)
        self._space = [text[len(words) :]] if len(words) < len(text) else []
        self.is_after_call = False
        return [content]

    def call(self) -> None:
        """Note that a call begins or ends here."""
        self._space = []
        self.is_after_call = True

    def finish(self) -> list[ToolPart]:
        return [Content("".join(self._space))] if self._space and not self.is_after_call else []


class MarkFilter:
    """Fulfils :class:`.call_parser.ToolParser` for answers without calls: leaves out the marks around them."""

    is_within_call = False

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._text = ""

    def feed(self, text: str) -> list[ToolPart]:
        parts: list[ToolPart] = []
        mark, self._text = self._marks[0], self._text + text
        while mark:
            before, mark, self._text = find_marker(self._text, self._marks)
            parts += [Content(before)] if before else []
        return parts

    def finish(self) -> list[ToolPart]:
        text, self._text = self._text, ""
        return [Content(text)] if text else []
