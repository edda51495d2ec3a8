"""Reads arguments that are written one by one between marks, and writes them as a JSON object."""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum, auto
from typing import Any

import msgspec

from tokenloom.request.tool_format import KIND, ToolFormat

from .literals import LiteralReader
from .message_parts import Expected, expected, find_marker

MAX_KEY = 512
"""Characters of the longest key: what is longer is none."""
_MAX_BLANKS = 64
"""Blanks after a closing mark within which another mark shows that the value has ended."""
_MAX_REFERENCES = 8
_MAX_DEPTH, _MAX_WAYS = 2, 16
"""How deep choices are followed to learn the types of an argument, and of how many ways each: a choice may name itself
many times, and the schema comes from a client."""
_TEXT_OR_NULL = {"string", "null"}
_NULLS = ("null", "None")


class ValueKind(Enum):
    """What the schema of a tool says of an argument."""

    TEXT = auto()
    """A text, whatever stands there."""
    TEXT_OR_NULL = auto()
    """A text, unless ``null`` stands there."""
    VALUE = auto()
    """No text."""
    UNKNOWN = auto()
    """Either: what can be read as JSON is no text."""


def value_kind(schema: Mapping[str, Any], key: str) -> ValueKind:
    """Return what a tool's schema says of an argument."""
    types = _types(schema, property_of(schema, key))
    if not types:
        return ValueKind.UNKNOWN
    if types <= _TEXT_OR_NULL and "string" in types:
        return ValueKind.TEXT_OR_NULL if "null" in types else ValueKind.TEXT
    return ValueKind.UNKNOWN if "string" in types else ValueKind.VALUE


def property_of(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of an argument, where a reference within the tool's schema leads; empty if there is none."""
    properties = schema.get("properties")
    return _followed(schema, properties.get(key) if isinstance(properties, Mapping) else None)


def texts_of(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the schemas of which a text follows one: that of an argument, or those of its choices."""
    return _texts(schema, property_of(schema, key), _MAX_DEPTH)


def _texts(schema: Mapping[str, Any], found: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    ways = found.get("anyOf") or found.get("oneOf") or found.get("allOf")
    if not isinstance(ways, list) or not depth or found.keys() & {"type", "enum", "const"}:
        return [found]
    followed = [_followed(schema, way) for way in ways]
    texts = [way for way in followed if "string" in (_types(schema, way) or {"string"})]
    return [each for way in texts for each in _texts(schema, way, depth - 1)]


def _followed(schema: Mapping[str, Any], found: object) -> Mapping[str, Any]:
    for _ in range(_MAX_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found = schema
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _types(schema: Mapping[str, Any], found: Mapping[str, Any], depth: int = _MAX_DEPTH) -> Set[str]:
    """Return the types that a value may have; empty if it may have any, or if that is not clear."""
    types = found.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {each for each in types if isinstance(each, str)}
    values = [found["const"]] if "const" in found else found.get("enum")
    if isinstance(values, list):
        return {"null" if value is None else "string" if isinstance(value, str) else "other" for value in values}
    ways = found.get("anyOf") or found.get("oneOf") or found.get("allOf")
    if not isinstance(ways, list) or not depth or len(ways) > (1 if "allOf" in found else _MAX_WAYS):
        return set()
    each = [_types(schema, _followed(schema, way), depth - 1) for way in ways]
    return set().union(*each) if all(each) else set()


_HELD = {ValueKind.UNKNOWN: '{["-0123456789tfnTFN', ValueKind.TEXT_OR_NULL: "nN"}
"""Of each kind: with what a value begins that may be no text."""


class PairReader:
    """Reads pairs up to the mark after the last one. Texts are passed on as they are written.

    Attributes:
        ended: Whether the mark after the last pair was read.
    """

    def __init__(self, form: ToolFormat, closers: Sequence[str], kind_of: Callable[[str], ValueKind]) -> None:
        """``closers``: what may follow the last pair; it is left in the text."""
        self.ended = False
        pair = form.pair
        self._open, self._between, self._close = (text.split() for text in pair)
        self._kinds = form.kinds
        self._after_value = [self._open[0], *closers]
        self._breaks = pair[1].endswith("\n"), pair[2].startswith("\n")  # line breaks around a value
        self._kind_of = kind_of
        self._text = ""
        self._step: Callable[[list[str]], bool] = self._next_pair
        self._due: list[str] = []  # the marks that follow
        self._then: Callable[[list[str]], bool] = self._next_pair
        self._num_pairs = 0
        self._kind = ValueKind.TEXT
        self._begun = False
        self._streams = False
        self._literal: LiteralReader | None = None
        self._value: list[str] = []  # held until its end

    def feed(self, text: str) -> tuple[str, str]:
        """Return what is certain now, and the text after the pairs."""
        out: list[str] = []
        self._text += text
        while not self.ended and self._step(out):
            pass
        rest = ""
        if self.ended:
            rest, self._text = self._text, ""
        return "".join(out), rest

    def finish(self) -> str:
        """Return the rest of what was cut off: of a value that has not ended, what is passed on as it is written, and
        what was held as JSON up to where it was cut."""
        out: list[str] = []
        if self._step == self._in_value:
            self._text, mark, _ = find_marker(self._text, self._close[:1])
            self._more(out, self._break_before(len(self._text)))
            if mark:
                self._end_value(out)
            elif (held := "".join(self._value).lstrip()).startswith(("{", "[")):
                out.append(LiteralReader().feed(held)[0])
        return "".join(out)

    def _next_pair(self, out: list[str]) -> bool:
        self._text = self._text.lstrip()
        found = expected(self._text, self._after_value)
        if found is Expected.MAYBE:
            return False
        if found != self._open[0]:  # a closing mark, or no mark at all
            return self._end(out)
        self._expect([*self._open], self._key)
        return True

    def _expect(self, marks: list[str], then: Callable[[list[str]], bool]) -> None:
        self._due, self._then, self._step = marks, then, self._marks

    def _marks(self, out: list[str]) -> bool:
        """Skip the marks that are due; one that is missing is not waited for."""
        while self._due:
            self._text = self._text.lstrip()
            due = [self._due[0].replace(KIND, kind) for kind in self._kinds]
            found = expected(self._text, due)
            if found is Expected.MAYBE:
                return False
            if isinstance(found, str):
                self._text = self._text[len(found) :]
                if due[0] != due[1]:
                    self._kind = ValueKind.TEXT if found == due[0] else ValueKind.VALUE
            del self._due[0]
        self._step = self._then
        return True

    def _key(self, out: list[str]) -> bool:
        key, mark, rest = find_marker(self._text, self._between[:1])
        if not mark:
            if len(self._text) > MAX_KEY:
                self._end(out)
            return False
        key, self._text = key.strip(), rest
        out.append(("{" if not self._num_pairs else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_pairs += 1
        self._kind, self._begun, self._streams, self._literal = self._kind_of(key), False, False, None
        self._value = []
        self._expect(self._between[1:], self._begin_value)
        return True

    def _end(self, out: list[str]) -> bool:
        out.append("}" if self._num_pairs else "{}")
        self.ended = True
        return False

    def _begin_value(self, out: list[str]) -> bool:
        """Skip the line break before a value, and decide how it is read."""
        if not self._text:
            return False
        if self._breaks[0] and not self._begun:
            self._text = self._text.removeprefix("\n")
            self._begun = True
        ahead = self._text.lstrip()
        if self._kind is not ValueKind.TEXT and not ahead:
            self._value.append(self._text)
            self._text = ""
            return False
        # The last line break of an empty value belongs to its closing mark, in whatever pieces the text came.
        self._text, self._value = "".join([*self._value, self._text]), []
        if self._kind is ValueKind.VALUE and ahead[0] in "{[":
            self._literal = LiteralReader()
        elif self._kind is ValueKind.TEXT or ahead[0] not in _HELD.get(self._kind, ahead[0]):
            self._streams = True
            out.append('"')
        self._step = self._in_value
        return True

    def _in_value(self, out: list[str]) -> bool:
        """Read a value up to its closing mark: one that another mark follows."""
        mark = self._close[0]
        at = self._text.find(mark)
        if at < 0:
            self._more(out, self._held_from(mark))
            return False
        rest = self._text[at + len(mark) :]
        ahead = rest.lstrip()
        follows = expected(ahead, self._after_value)
        if follows is Expected.MAYBE and len(rest) - len(ahead) <= _MAX_BLANKS:
            self._more(out, self._break_before(at))
            return False
        if follows is Expected.NO and ahead:
            self._more(out, at + len(mark))
            return True
        self._more(out, self._break_before(at))
        self._text = rest
        self._end_value(out)
        self._expect(self._close[1:], self._next_pair)
        return True

    def _break_before(self, at: int) -> int:
        """Return where a value ends before its closing mark: a line break there belongs to the mark."""
        return at - 1 if self._breaks[1] and self._text[:at].endswith("\n") else at

    def _held_from(self, mark: str) -> int:
        """Return up to where the text is certainly the value's."""
        return self._break_before(len(find_marker(self._text, (mark,))[0]))

    def _more(self, out: list[str], end: int) -> None:
        text, self._text = self._text[:end], self._text[end:]
        if self._streams:
            out.append(_escaped(text))
        elif self._literal is not None:
            if not self._literal.ended:
                out.append(self._literal.feed(text)[0])
        else:
            self._value.append(text)

    def _end_value(self, out: list[str]) -> None:
        if self._streams:
            out.append('"')
        elif self._literal is None:
            text = "".join(self._value)
            is_text = self._kind is ValueKind.TEXT_OR_NULL and text.strip() not in _NULLS
            out.append(json.dumps(text, ensure_ascii=False) if is_text else _as_json(text))
        elif not self._literal.ended:
            out.append(self._literal.close())


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """Return a value that was read whole as JSON: as a text if it is no other value."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        msgspec.json.decode(word)
    except (msgspec.DecodeError, RecursionError):
        pass
    else:
        return word
    if word.startswith(("{", "[")):
        reader = LiteralReader()
        written, rest = reader.feed(word)
        if reader.ended and not rest.strip():
            return written
    return json.dumps(text, ensure_ascii=False)
