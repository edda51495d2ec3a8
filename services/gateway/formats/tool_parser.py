"""Defines parsers of tool calls, and keeps the text around calls."""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from .message_parts import Content, ToolPart
from .strict_calls import CallMarks


class ToolParser(Protocol):
    """Finds calls in one output as it grows. The calls do not depend on the pieces that the text arrives in."""

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun and not ended; at the output's end: whether it was cut off."""

    # One parser reads streams and whole answers, because two may differ, as vLLM's can; a property test splits texts
    # everywhere and compares. Arguments go on as the model wrote them, not parsed and written again.
    def feed(self, text: str) -> list[ToolPart]:
        """Return what is certain after more text."""

    def finish(self) -> list[ToolPart]:
        """Return the rest at the output's end; a call that was cut off stays incomplete."""


def new_call_id() -> str:
    """Return a call's id in OpenAI's form. A tool's result names the call by it."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    open: Callable[[Collection[str]], ToolParser]
    """Makes a parser for one output, given the names of the tools."""
    keeps_special_tokens: bool = False
    """Whether the marks of a call are special tokens, which texts otherwise do not contain."""
    new_call_id: Callable[[], str] = new_call_id
    """Makes ids that the format's templates accept."""
    marks: CallMarks | None = None
    """The texts around a call; None: they vary, so the arguments of strict tools cannot be bound."""
    openings: Sequence[str] = ()
    """The texts with which calls begin, and ordinary answers do not."""


class Words:
    """Text around calls: space before a call is not content."""

    def __init__(self) -> None:
        self._space: list[str] = []
        self._after_call = False

    def add(self, text: str) -> list[ToolPart]:
        words = text.rstrip()
        if not words:
            if text:
                self._space.append(text)
            return []
        content = Content("".join(self._space) + words)
        self._space = [text[len(words) :]] if len(words) < len(text) else []
        self._after_call = False
        return [content]

    def call(self) -> None:
        """Note that a call begins here."""
        self._space = []
        self._after_call = True

    def finish(self) -> list[ToolPart]:
        return [Content("".join(self._space))] if self._space and not self._after_call else []
