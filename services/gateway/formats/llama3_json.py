"""Calls of Llama 3.1 and later: the whole output is ``{"name": …, "parameters": {…}}``, or several with semicolons."""

from collections.abc import Collection

from .call_object import CallObject
from .message_parts import Content, ToolPart, begins_marker
from .strict_calls import CallMarks

MARKS = CallMarks('{"name": "', '{"name": "', '", "parameters": ', "}")
_TAG = "<|python_tag|>"
OPENINGS = (_TAG, MARKS.trigger)
_BLANKS = " \t\r\n"
_SEPARATORS = "; \t\r\n"


class Llama3JsonParser:
    """Fulfils :class:`.tool_parser.ToolParser`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names  # an answer may be JSON too: only an object that names a tool is a call
        self._text = ""
        self._blanks: list[str] = []  # held until something else follows
        self._call: CallObject | None = None
        self._may_call = True
        self._called = False

    @property
    def is_within_call(self) -> bool:
        return self._call is not None

    def feed(self, text: str) -> list[ToolPart]:
        parts: list[ToolPart] = []
        is_open = self._text[-1:] not in self._separators()  # after what may begin a mark
        if self._call is None and self._may_call and not is_open and not text.strip(self._separators()):
            self._blanks.append(text)
            return parts
        self._take_blanks()
        self._text += text
        while self._text:
            if self._call is not None:
                found, self._text = self._call.feed(self._text)
                parts += found
                if self._call.is_over:
                    self._called = self._may_call = self._call.began
                    self._call = None
            elif not self._may_call:
                parts.append(Content(self._text))
                self._text = ""
            elif not self._find_call():
                break
        return parts

    def finish(self) -> list[ToolPart]:
        if self._call is not None:
            return self._call.finish()
        self._take_blanks()
        rest = self._text.lstrip(_SEPARATORS) if self._called else self._text
        return [Content(rest)] if rest else []

    def _separators(self) -> str:
        return _SEPARATORS if self._called else _BLANKS

    def _take_blanks(self) -> None:
        if self._blanks:
            self._text += "".join(self._blanks)
            self._blanks = []

    def _find_call(self) -> bool:
        """Return whether it is clear what follows: a call, or only text from here on."""
        ahead = self._text.lstrip(self._separators())
        mark = self._text[: len(self._text) - len(ahead)]
        if ahead.startswith(_TAG):
            mark += _TAG
            ahead = ahead.removeprefix(_TAG).lstrip()
        if not ahead or begins_marker(ahead, _TAG):
            return False
        if ahead[0] == "{":
            self._text, self._call = ahead, CallObject(mark, self._names)
        else:
            self._may_call = False
        return True
