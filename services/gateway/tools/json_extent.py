"""Where a JSON value ends, character by character. Whether it is valid JSON its reader finds out."""

_ENDS_SCALAR = frozenset(",}] \t\r\n")


class JsonExtent:
    """One value, beginning with its first character.

    Attributes:
        ended: Whether it is whole. A number or word is whole only when something follows.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._kind = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def takes(self, char: str) -> bool:
        """Whether the character belongs to the value."""
        if not self._kind:
            self._kind = char
            if char not in '"{[':
                return not self._end_if(char in _ENDS_SCALAR)
        elif self._kind not in '"{[':
            return not self._end_if(char in _ENDS_SCALAR)
        if self._in_string:
            self._in_string_takes(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self._end_if(not self._in_string and not self._depth)
        return True

    def _in_string_takes(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _end_if(self, ended: bool) -> bool:
        self.ended = ended
        return ended
