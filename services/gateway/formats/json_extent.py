"""Finds where a JSON value ends, character by character. Whether it is valid JSON is its reader's business."""

_ENDS_SCALAR = frozenset(",}] \t\r\n")


class JsonExtent:
    """One value, beginning with its first character.

    Attributes:
        ended: Whether the value is complete. A number or word is complete only when something follows.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._kind = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def takes(self, char: str) -> bool:
        """Return whether the character belongs to the value."""
        self._kind = self._kind or char
        if self._kind not in '"{[':
            self.ended = char in _ENDS_SCALAR
            return not self.ended
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.ended = not self._in_string and not self._depth
        return True
