"""Calls of Hermes, Qwen2.5, Qwen3 and the demo model: JSON objects between ``<tool_call>`` and ``</tool_call>``."""

from .call_object import CallObject
from .message_parts import ToolPart, find_marker
from .strict_calls import CallMarks
from .tool_parser import Words

START, END = "<tool_call>", "</tool_call>"
MARKS = CallMarks(START, f'{START}\n{{"name": "', '", "arguments": ', f"}}\n{END}")


class HermesParser:
    """Fulfils :class:`.tool_parser.ToolParser`."""

    def __init__(self) -> None:
        self._text = ""
        self._words = Words()
        self._call: CallObject | None = None
        self._unclosed = False  # after a call whose closing mark may follow

    @property
    def is_within_call(self) -> bool:
        return self._call is not None

    def feed(self, text: str) -> list[ToolPart]:
        parts: list[ToolPart] = []
        self._text += text
        while self._text:
            if self._call is None:
                if not self._find_call(parts):
                    break
                continue
            found, self._text = self._call.feed(self._text)
            parts += found
            if self._call.is_over:
                self._unclosed = self._call.began
                self._call = None
        return parts

    def finish(self) -> list[ToolPart]:
        if self._call is not None:
            return self._call.finish()
        return self._words.add(self._text) + self._words.finish()

    def _find_call(self, parts: list[ToolPart]) -> bool:
        """Return whether there may be more to find."""
        before, marker, self._text = find_marker(self._text, (START, END))
        parts += self._words.add(before)
        if marker == START:
            self._words.call()
            self._call = CallObject(START)
        elif marker == END and self._unclosed:
            self._unclosed = False
            self._words.call()  # the space before the closing mark belongs to the call
        else:
            parts += self._words.add(marker)
        return bool(marker)
