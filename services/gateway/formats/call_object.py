"""Reads calls written as ``{"name": …, "arguments": {…}}`` while they are written."""

import json
from collections.abc import Collection, Iterable
from itertools import groupby

from .message_parts import CallArguments, CallBegin, Content, ToolPart

_ENDS_SCALAR = frozenset(",}] \t\r\n")
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}


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

    def written(self, char: str) -> str:
        """Return the character that was taken last as JSON spells it: models write line breaks in strings as such."""
        return _CONTROLS.get(char, char) if self._in_string else char


_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
"""Models use either name."""
_WITHIN = "function"
"""Some families write name and arguments in an object under this name."""


class CallObject:
    """One object. Until its name is known it may turn out not to be a call; it is then returned as text.

    Attributes:
        is_over: Whether the object has ended.
        began: Whether it is a call.
    """

    def __init__(self, mark: str = "", names: Collection[str] | None = None) -> None:
        """``mark``: what stood before the object, returned as text with it; ``names``: the only names of calls."""
        self.is_over = False
        self.began = False
        self._names = names
        self._raw = [mark]
        self._step = self._open
        self._value = JsonExtent()
        self._key = ""
        self._token: list[str] = []
        self._arguments = ""  # held until the name is known, or until they end
        self._has_sent = False
        self._streams = False
        self._depth = 1  # objects of the call that are open
        self._parts: list[ToolPart] = []

    def feed(self, text: str) -> tuple[list[ToolPart], str]:
        """Return what is certain now, and the text after the call."""
        for at, char in enumerate(text):
            if self.is_over:
                return self._take(), text[at:]
            if not self.began:
                self._raw.append(char)
            self._step(char)
        return self._take(), ""

    def finish(self) -> list[ToolPart]:
        """Return the rest when the text ends before the call. What was cut before its name is no text if it can only be
        a call: clients would show the user its markup."""
        if not self.is_over:
            if self.began and self._arguments and not self._has_sent:
                self._parts.append(CallArguments(self._arguments))
            if self._names is None or self._raw[0].strip() or self._begins_name():
                self.is_over = True
            else:
                self._end()
        return self._take()

    def _begins_name(self) -> bool:
        """Return whether the text ends within the name of a call that may be made."""
        if self.began or self._key not in _NAMES or self._step != self._in_value:
            return False
        begun = "".join(self._token)[1:]
        return any(name.startswith(begun) for name in self._names or ())

    def _take(self) -> list[ToolPart]:
        """Return the parts, with adjacent arguments joined."""
        taken: list[ToolPart] = []
        for is_arguments, parts in groupby(self._parts, lambda part: isinstance(part, CallArguments)):
            if is_arguments:
                taken.append(CallArguments("".join(part.text for part in parts if isinstance(part, CallArguments))))
            else:
                taken += parts
        self._parts = []
        return taken

    def _open(self, char: str) -> None:
        if char == "{":
            self._step = self._before_key
        elif not char.isspace():
            self._end()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._begin_value(char)
            self._step = self._in_key
        elif char == "}":
            self._close()
        elif char != "," and not char.isspace():
            self._end()

    def _in_key(self, char: str) -> None:
        self._value.takes(char)
        self._token.append(char)
        if self._value.ended:
            key = _string(self._token)
            self._key = "" if key is None else key
            self._step = self._before_value

    def _before_value(self, char: str) -> None:
        if char == ":" or char.isspace():
            return
        if char == "{" and self._key == _WITHIN and not self.began:
            self._depth += 1
            self._step = self._before_key
            return
        self._begin_value(char)
        self._streams = self._key in _ARGUMENTS and char == "{" and self.began and not self._has_sent
        if self._streams:
            self._has_sent = True
            self._parts.append(CallArguments(char))
        self._step = self._in_value

    def _in_value(self, char: str) -> None:
        if not self._value.takes(char):
            self._end_value()
            self._before_key(char)
            return
        char = self._value.written(char)
        self._token.append(char)
        if self._streams:
            self._parts.append(CallArguments(char))
        if self._value.ended:
            self._end_value()

    def _begin_value(self, char: str) -> None:
        self._value = JsonExtent()
        self._value.takes(char)
        self._token = [char]

    def _end_value(self) -> None:
        self._step = self._before_key
        if self._key in _NAMES and not self.began:
            name = _string(self._token)
            if not name or (self._names is not None and name not in self._names):
                self._end()
                return
            self.began = True
            self._parts.append(CallBegin(name))
        elif self._key in _ARGUMENTS and not self._has_sent and not self._arguments:
            # Some models write the arguments as a string that holds JSON, as in OpenAI's API.
            token, text = "".join(self._token), _string(self._token)
            self._arguments = "{}" if token == "null" else token if text is None else text
        if self.began and self._arguments and not self._has_sent:
            self._has_sent = True
            self._parts.append(CallArguments(self._arguments))

    def _close(self) -> None:
        self._depth -= 1
        if self._depth:
            self._step = self._before_key
            return
        if self.began and not self._has_sent:
            self._parts.append(CallArguments("{}"))
        self._end()

    def _end(self) -> None:
        self.is_over = True
        if not self.began:
            self._parts.append(Content("".join(self._raw)))


def _string(token: Iterable[str]) -> str | None:
    """Return the value of a JSON string, given its characters; None for another value.

    A model may write half a surrogate pair, which is no character and cannot be sent: U+FFFD takes its place.
    """
    try:
        value = json.loads("".join(token))
    except ValueError:
        return None
    if not isinstance(value, str):
        return None
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
