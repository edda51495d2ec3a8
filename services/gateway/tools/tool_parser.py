"""What a parser of tool calls is, and the text around calls."""

from collections.abc import Collection
from typing import Protocol

from ..assistant.message_parts import Content, ToolPart


class ToolParser(Protocol):
    """Finds calls in one output as it grows. Whatever pieces the text comes in, the calls are the same."""

    def feed(self, text: str) -> list[ToolPart]:
        """What is certain after some more text."""

    def finish(self) -> list[ToolPart]:
        """What is left at the output's end: a call that was cut off stays as far as it came."""


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    keeps_special_tokens: bool
    """Whether the marks of a call are special tokens, which texts are otherwise without."""

    def parser(self, names: Collection[str]) -> ToolParser:
        """For one output. ``names``: of the tools that there are."""

    def new_call_id(self) -> str:
        """As the format's templates take it back."""


class Words:
    """Text beside calls: space before a call is no content."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def add(self, text: str) -> list[ToolPart]:
        whole = self._space + text
        words = whole.rstrip()
        self._space = whole[len(words) :]
        if not words:
            return []
        self._after_call = False
        return [Content(words)]

    def call(self) -> None:
        """A call begins here."""
        self._space = ""
        self._after_call = True

    def finish(self) -> list[ToolPart]:
        return [Content(self._space)] if self._space and not self._after_call else []
