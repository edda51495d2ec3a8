"""Reads calls written as a JSON array of objects."""

from .call_object import CallObject
from .message_parts import Content, ToolPart


class CallList:
    """Reads ``[{"name": …, "arguments": {…}}, …]`` while it is written. Required calls are constrained to this form.

    Attributes:
        is_over: Whether the list has ended.
    """

    def __init__(self, mark: str = "") -> None:
        """``mark``: what stood before the list; it is returned as text with the list when no call begins."""
        self.is_over = False
        self._lead = [mark] if mark else []
        self._is_open = False
        self._call: CallObject | None = None

    def feed(self, text: str) -> tuple[list[ToolPart], str]:
        """Return what is certain now, and the text after the list."""
        parts: list[ToolPart] = []
        at = 0
        while at < len(text) and not self.is_over:
            if self._call is None:
                at += self._between(text[at], parts)
                continue
            found, rest = self._call.feed(text[at:])
            at = len(text) - len(rest)
            parts += found
            if self._call.is_over:
                self.is_over = not self._call.began
                self._call = None
        return parts, text[at:]

    def finish(self) -> list[ToolPart]:
        """Return the rest when the text ends before the list."""
        if self._call is not None:
            return self._call.finish()
        return [Content("".join(self._lead))] if self._lead and not self.is_over else []

    def _between(self, char: str, parts: list[ToolPart]) -> int:
        """Read one character outside of the objects; return 1, or 0 if the character begins an object."""
        if char == "{" and self._is_open:
            self._call, self._lead = CallObject("".join(self._lead)), []
            return 0
        if char == "[" and not self._is_open:
            self._is_open = True
        elif not (char.isspace() or (char == "," and self._is_open)):
            self.is_over = True
            if char != "]" or not self._is_open or self._lead:
                parts.append(Content("".join(self._lead) + char))
            self._lead = []
            return 1
        if self._lead:
            self._lead.append(char)
        return 1
