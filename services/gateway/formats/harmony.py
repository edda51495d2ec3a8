"""Turns of gpt-oss, in the format harmony: messages with a header each, which names a channel and may name a recipient.

``analysis`` holds reasoning, ``final`` and ``commentary`` text for the user, and a message to a function is a call:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{…}<|call|>
"""

import re
from enum import Enum, auto

from .call_object import JsonExtent
from .message_parts import CallArguments, CallBegin, Content, Part, ReasoningText, ToolPart, find_marker

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
"""What ends a message; a header that follows may begin without another mark."""
_HEADS = (_CHANNEL, _START, _MESSAGE, "to=")
"""How an output begins that has headers: the prompt ends within the first one."""
_MOST_BLANKS = 8
"""Characters of space before such a beginning; after more, the output is text."""
OPENINGS = (" to=functions.",)
"""With which calls begin."""
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([a-z]+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


class _Kind(Enum):
    UNKNOWN = auto()
    """The output has begun with nothing that decides."""
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class HarmonyParser:
    """Reads one output as it grows: reasoning, text and calls."""

    def __init__(self, *, inside: bool = False) -> None:
        """``inside``: text without a header is reasoning, as the engine counts it; the prompt may have opened it."""
        self._kind = _Kind.UNKNOWN
        self._plain = _Kind.REASONING if inside else _Kind.CONTENT
        self._text = ""
        self._header: list[str] = []
        self._said: set[_Kind] = set()  # kinds of text that the output has so far
        self._separates = False  # before the next text, a line break parts it from the last message of its kind
        self._arguments: JsonExtent | None = None

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun, and its arguments are not complete."""
        return self._kind is _Kind.CALL and (self._arguments is None or not self._arguments.ended)

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after more text."""
        parts: list[Part] = []
        self._text += text
        while self._text:
            if self._kind is _Kind.UNKNOWN and not self._begin():
                break
            markers = (_MESSAGE,) if self._kind is _Kind.HEADER else _ENDS
            before, marker, self._text = find_marker(self._text, markers)
            if self._kind is not _Kind.HEADER:
                parts += self._said_more(before)
            else:
                self._header.append(before)
            if not marker:
                break
            if marker == _MESSAGE:
                parts += self._open("".join(self._header))
            else:
                self._kind, self._header = _Kind.HEADER, [marker]
        return parts

    def finish(self) -> list[Part]:
        """Return the rest at the output's end; a header that was cut off is no text."""
        text, self._text = self._text, ""
        if self._kind is _Kind.UNKNOWN:
            self._kind = _Kind.HEADER if text.lstrip().startswith("<|") else self._plain
        return self._said_more(text) if text and self._kind is not _Kind.HEADER else []

    def _begin(self) -> bool:
        """Return whether it is clear how the output begins."""
        ahead = self._text.lstrip()
        if len(self._text) - len(ahead) > _MOST_BLANKS:
            self._kind = self._plain
        elif ahead.startswith(_HEADS):
            self._kind = _Kind.HEADER
        elif not any(head.startswith(ahead) for head in _HEADS):
            self._kind = self._plain
        return self._kind is not _Kind.UNKNOWN

    def _open(self, header: str) -> list[Part]:
        """Begin the message of a header."""
        function, channel = _FUNCTION.search(header), _CHANNEL_NAME.search(header)
        if function is not None:
            self._kind, self._arguments = _Kind.CALL, None
            return [CallBegin(function[1])]
        is_reasoning = channel is not None and channel[1] == "analysis"
        self._kind = _Kind.REASONING if is_reasoning else _Kind.CONTENT
        self._separates = self._kind in self._said
        return []

    def _said_more(self, text: str) -> list[Part]:
        if self._kind is _Kind.CALL:
            return self._more_arguments(text)
        if not text:
            return []
        if self._separates:
            text, self._separates = "\n" + text, False
        self._said.add(self._kind)
        return [ReasoningText(text) if self._kind is _Kind.REASONING else Content(text)]

    def _more_arguments(self, text: str) -> list[Part]:
        if self._arguments is None:
            text = text.lstrip()
            if not text:
                return []
            self._arguments = JsonExtent()
        written = []
        for char in text:
            if self._arguments.ended or not self._arguments.takes(char):
                break
            written.append(self._arguments.written(char))
        return [CallArguments("".join(written))] if written else []


class HarmonyToolParser:
    """Fulfils :class:`.call_parser.ToolParser` where reasoning is read as text."""

    def __init__(self) -> None:
        self._parser = HarmonyParser()

    @property
    def is_within_call(self) -> bool:
        return self._parser.is_within_call

    def feed(self, text: str) -> list[ToolPart]:
        return self._as_text(self._parser.feed(text))

    def finish(self) -> list[ToolPart]:
        return self._as_text(self._parser.finish())

    @staticmethod
    def _as_text(parts: list[Part]) -> list[ToolPart]:
        return [Content(part.text) if isinstance(part, ReasoningText) else part for part in parts]


class PlainContent:
    """Fulfils :class:`.call_parser.ToolParser` for text whose calls a :class:`HarmonyParser` has found."""

    is_within_call = False

    def feed(self, text: str) -> list[ToolPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[ToolPart]:
        return []
