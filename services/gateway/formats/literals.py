"""Writes values as JSON while they are read: JSON itself, Python's literals, and objects whose keys have no quotes."""

import ast
import json
from collections.abc import Sequence

import msgspec

from .call_object import JsonExtent

_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.$")
_CLOSING = {"(": ")]", "[": "]]", "{": "}}"}
"""Of each bracket: the one that closes it, and the one that JSON closes it with."""
_OF_CALL = ")}"
"""Of the bracket before the arguments of a call."""
_KEPT_ESCAPES = frozenset('"\\/bfnrt')
_LONGEST_NUMBER = 64
_HEX = frozenset("0123456789abcdefABCDEF")


class ObjectReader:
    """Passes on a JSON object as it is written.

    Attributes:
        ended: Whether the object is complete.
    """

    def __init__(self) -> None:
        self._extent = JsonExtent()

    @property
    def ended(self) -> bool:
        return self._extent.ended

    def feed(self, text: str) -> tuple[str, str]:
        """Return what is certain now, and the text after the object."""
        written: list[str] = []
        for at, char in enumerate(text):
            if self._extent.ended:
                return "".join(written), text[at:]
            self._extent.takes(char)
            written.append(self._extent.written(char))
        return "".join(written), ""

    def finish(self) -> str:
        """Return the rest of an object that was cut off."""
        return ""


class LiteralReader:
    """Reads one value that begins with a bracket, and writes it as JSON.

    After ``(`` come the arguments of a call of Python: the value is an object then.

    Attributes:
        ended: Whether the value is complete.
    """

    def __init__(self, *, string_mark: str = "", names: Sequence[str] = ()) -> None:
        """``string_mark``: what stands on both sides of strings. ``names``: of arguments that are written without."""
        self.ended = False
        self._mark = string_mark
        self._names = names
        self._out: list[str] = []
        self._stack: list[str] = []  # the closing brackets that are due, as read and as written
        self._word: list[str] = []
        self._lead: list[str] = []  # a comma and blanks: a bracket that closes takes back the comma
        self._quote = ""
        self._escape: str | None = None  # what was read of an escape
        self._is_key = False
        self._held = ""  # what may begin the string mark
        self._num_args = 0
        self._key: str | None = None  # at the place of an argument's name, until it is clear that it is one

    def feed(self, text: str) -> tuple[str, str]:
        """Return what is certain now, and the text after the value."""
        for at, char in enumerate(text):
            if self.ended:
                return self._take(), text[at:]
            self._read(char)
        return self._take(), ""

    def finish(self) -> str:
        """Return the rest of a value that was cut off: of a number or word the end is not known."""
        return ""

    def close(self) -> str:
        """End a value whose end is missing, and return the rest of it."""
        if self._quote:
            self._quote, self._escape, self._held = "", None, ""
            self._out.append('"')
        self._end_word(" ")
        while self._stack:
            self._close()
        return self._take()

    def _take(self) -> str:
        written, self._out = "".join(self._out), []
        return written

    def _read(self, char: str) -> None:
        if self._quote:
            self._in_string(char)
        elif self._held or (self._mark and char == self._mark[0]):
            self._in_mark(char)
        elif char in _WORD or (self._word and char.isalnum()):
            self._word.append(char)
        else:
            self._end_word(char)
            self._punctuation(char)

    def _in_mark(self, char: str) -> None:
        """Read a character of the mark before a string."""
        self._held += char
        if self._held == self._mark:
            self._held = ""
            self._begin_string(self._mark)
        elif not self._mark.startswith(self._held):
            self._held = ""  # no value begins like this

    def _punctuation(self, char: str) -> None:
        if char in "\"'":
            self._begin_string(char)
        elif char in _CLOSING:
            self._value()
            self._stack.append(_CLOSING[char] if self._stack or char != "(" else _OF_CALL)
            self._is_key = self._stack[-1][1] == "}"
            self._out.append("{" if self._is_key else "[")
        elif self._stack and char == self._stack[-1][0]:
            self._close()
        elif char == ",":
            self._lead.append(char)
            self._is_key = bool(self._stack) and self._stack[-1][1] == "}"
        elif char in ":=" and self._stack:
            if self._key is not None:
                self._out.append(self._key)
                self._key = None
            self._out.append(": " if char == "=" else char)
            self._is_key = False
        elif char.isspace():
            (self._lead if self._lead else self._out).append(char)

    def _close(self) -> None:
        if self._key is not None:
            self._positional()
        self._out += [blank for blank in self._lead if blank != ","]
        self._lead = []
        self._out.append(self._stack.pop()[1])
        self._is_key = False
        self.ended = not self._stack

    def _begin_string(self, quote: str) -> None:
        self._value()
        self._quote, self._held = quote, ""
        self._out.append('"')

    def _value(self) -> None:
        """Write what stands before a value that begins here."""
        self._out += self._lead
        self._lead = []
        if self._is_key and self._stack[-1] == _OF_CALL:
            self._name_position()

    def _name_position(self) -> None:
        """Name an argument that is written without its name."""
        at, self._num_args = self._num_args, self._num_args + 1
        self._out.append(json.dumps(self._names[at] if at < len(self._names) else f"arg{at}") + ": ")
        self._is_key = False

    def _positional(self) -> None:
        assert self._key is not None
        value, self._key = json.loads(self._key), None
        self._name_position()
        self._out.append(_as_json(value))

    def _end_word(self, follows: str) -> None:
        if self._word:
            word, self._word = "".join(self._word), []
            self._out += self._lead
            self._lead = []
            if not self._is_key:
                self._out.append(_as_json(word))
            elif self._stack[-1] == _OF_CALL and follows != "=" and not follows.isspace():
                self._key = json.dumps(word)
                self._positional()
            elif self._stack[-1] == _OF_CALL:
                self._key = json.dumps(word)
            else:
                self._out.append(json.dumps(word))
        elif self._key is not None and follows == ",":
            self._positional()

    def _in_string(self, char: str) -> None:
        if self._escape is not None:
            self._in_escape(char)
        elif len(self._quote) > 1:
            self._in_marked(char)
        elif char == self._quote:
            self._quote = ""
            self._out.append('"')
            self.ended = not self._stack
        elif char == "\\":
            self._escape = ""
        else:
            self._out.append(json.dumps(char, ensure_ascii=False)[1:-1])

    def _in_marked(self, char: str) -> None:
        """Read a character of a string that ends with the mark."""
        self._held += char
        while not self._quote.startswith(self._held):
            self._out.append(json.dumps(self._held[0], ensure_ascii=False)[1:-1])
            self._held = self._held[1:]
        if self._held == self._quote:
            self._held = self._quote = ""
            self._out.append('"')

    def _in_escape(self, char: str) -> None:
        escape = self._escape or ""
        size = {"u": 4, "x": 2}.get(escape[:1], 0)
        if size and char in _HEX:
            escape += char
            if len(escape) <= size:
                self._escape = escape
                return
            self._out.append("\\u" + escape[1:].rjust(4, "0"))
        elif size:  # not what the escape promises: a text
            self._out.append("\\\\" + escape)
            self._escape = None
            self._in_string(char)
            return
        elif char in "ux":
            self._escape = char
            return
        elif char in _KEPT_ESCAPES:
            self._out.append("\\" + char)
        elif char != "\n":
            self._out.append(char if char == "'" else json.dumps("\\" + char, ensure_ascii=False)[1:-1])
        self._escape = None


def _as_json(word: str) -> str:
    """Return a number or word as JSON writes it, as a text if JSON has no such value."""
    word = _WORDS.get(word, word)
    try:
        msgspec.json.decode(word)
    except msgspec.DecodeError:
        return _of_python(word) or json.dumps(word)
    return word


def _of_python(word: str) -> str:
    """Return a number of Python as JSON writes it; empty if it is none."""
    try:
        value = ast.literal_eval(word) if len(word) <= _LONGEST_NUMBER else word
        return json.dumps(value, allow_nan=False) if isinstance(value, int | float) else ""
    except (ValueError, SyntaxError):
        return ""
