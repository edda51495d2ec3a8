"""Finds reasoning between the marks of the model's format, before the answer."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenloom.request.reasoning import HARMONY, THINK_END, THINK_START, ReasoningFormat

from .harmony import HarmonyParser
from .message_parts import Content, Part, ReasoningText, TextPart, begins_marker, find_marker


class ReasoningParser(Protocol):
    """Finds reasoning in one output as it grows; what it returns does not depend on the pieces that the text comes
    in."""

    @property
    def is_within_call(self) -> bool:
        """Whether it also finds calls, and one has begun and not ended."""

    def feed(self, text: str) -> Sequence[Part]:
        """Return what is certain after more text."""

    def finish(self) -> Sequence[Part]:
        """Return the rest at the output's end."""


class ThinkParser:
    """Fulfils :class:`ReasoningParser`. Space around the marks is neither reasoning nor content."""

    is_within_call = False

    def __init__(self, marks: tuple[str, str] = (THINK_START, THINK_END), *, inside: bool) -> None:
        """``marks``: what opens and what closes the reasoning. ``inside``: the output begins with reasoning, with or
        without its opening mark."""
        self._start, self._end = marks
        self._inside = inside
        self._begun = False
        self._trims = inside  # space that follows is dropped
        self._text = ""
        self._blanks: list[str] = []  # held until something else follows

    def feed(self, text: str) -> list[TextPart]:
        """Return what is certain after more text."""
        # After what may begin a mark, space decides that it does not: otherwise what an event holds would depend on the
        # pieces in which the text came, and a stream that is resumed after it would repeat a character.
        is_open = bool(self._text) and not self._text[-1].isspace()
        if (self._inside or not self._begun) and not is_open and not text.strip():
            self._blanks.append(text)
            return []
        self._take_blanks()
        self._text += text
        if not self._begun and not self._begin():
            return []
        if not self._inside:
            return self._content()
        reasoning, marker, held = find_marker(self._text, (self._end,))
        if marker:
            self._inside, self._text = False, held
            parts = self._reasoning(reasoning.rstrip())
            self._trims = True
            return [*parts, *self._content()]
        kept = reasoning.rstrip()
        self._text = reasoning[len(kept) :] + held
        return self._reasoning(kept)

    def finish(self) -> list[TextPart]:
        """Return the rest at the output's end."""
        self._take_blanks()
        text, self._text = self._text, ""
        if self._inside:
            return self._reasoning(text)
        return [Content(text)] if text and not self._trims else []

    def _take_blanks(self) -> None:
        if self._blanks:
            self._text += "".join(self._blanks)
            self._blanks = []

    def _begin(self) -> bool:
        """Return whether it is clear how the output begins."""
        ahead = self._text.lstrip()
        if not ahead or begins_marker(ahead, self._start):
            return False
        self._begun = True
        if ahead.startswith(self._start):
            self._inside, self._text = True, ahead.removeprefix(self._start)
            self._trims = True
        return True

    def _content(self) -> list[TextPart]:
        text, self._text = self._trimmed(self._text), ""
        return [Content(text)] if text else []

    def _reasoning(self, text: str) -> list[TextPart]:
        text = self._trimmed(text)
        return [ReasoningText(text)] if text else []

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


OpenReasoning = Callable[[bool], ReasoningParser]
"""Makes a parser for one output, given whether the prompt has opened the reasoning."""


def opener(reasoning: ReasoningFormat) -> OpenReasoning:
    """Return what makes the parsers of outputs in this format."""
    if reasoning == HARMONY:
        return lambda opened: HarmonyParser(inside=opened)
    marks = reasoning.start, reasoning.end
    return lambda opened: ThinkParser(marks, inside=opened or reasoning.begins_inside)
