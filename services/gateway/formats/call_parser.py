"""Finds tool calls in outputs, in whatever format a model writes them, and keeps the text around them."""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from tokenloom.request.tool_format import ALNUM, HEX, ID, INDEX, NAME, ToolFormat, first_mark

from .call_object import CallObject
from .harmony import HarmonyToolParser
from .literals import LiteralReader, ObjectReader
from .message_parts import CallArguments, CallBegin, Content, Expected, ToolPart, Words, expected, find_marker
from .pairs import PairReader, value_kind
from .tool_request import Tool

MAX_NAME = 64
"""Characters of a tool's name, as in OpenAI's API."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PLACE = re.compile(f"({ID}|{INDEX})")
_SEPARATORS = ",;"


class ToolParser(Protocol):
    """Finds calls in one output as it grows. The calls do not depend on the pieces that the text arrives in."""

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun and not ended; at the output's end: whether it was cut off."""

    # One parser reads streams and whole answers, because two may differ, as vLLM's can; a property test splits texts
    # everywhere and compares. Arguments go on as the model wrote them, not parsed and written again.
    def feed(self, text: str) -> list[ToolPart]:
        """Return what is certain after more text."""

    def finish(self) -> list[ToolPart]:
        """Return the rest at the output's end; a call that was cut off stays incomplete."""


class ArgumentsReader(Protocol):
    """Reads the arguments of one call, and writes them as JSON."""

    @property
    def ended(self) -> bool:
        """Whether they are complete."""

    def feed(self, text: str) -> tuple[str, str]:
        """Return what is certain now, and the text after the arguments."""

    def finish(self) -> str:
        """Return the rest of arguments that were cut off."""


def open_parser(form: ToolFormat, tools: Sequence[Tool]) -> ToolParser:
    """Return a parser for one output."""
    return HarmonyToolParser() if form.syntax == "messages" else CallParser(form, tools)


def new_call_id(form: ToolFormat | None, name: str, random: Random) -> str:
    """Return an id for a call, in the form that the model's template accepts. A tool's result names the call by it."""
    text = (ToolFormat() if form is None else form).call_id.replace(NAME, name)
    text = text.replace(INDEX, str(random.randrange(10**9))).replace(HEX, f"{random.getrandbits(96):024x}")
    return text.replace(ALNUM, "".join(random.choice(string.ascii_letters + string.digits) for _ in range(9)))


def numbered_call_id(form: ToolFormat | None, name: str, number: int) -> str:
    """Return the id of a call that a client sends without one, by its number in the conversation: the same in each
    turn, so that the prompt is found in the cache, and where the model numbers its calls the one that it wrote."""
    text = (ToolFormat() if form is None else form).call_id.replace(NAME, name).replace(INDEX, str(number))
    return text.replace(HEX, f"{number:024x}").replace(ALNUM, f"{number:09}")


class CallParser:
    """Fulfils :class:`ToolParser` for all formats that write calls as text. Each step reads some of the text."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool]) -> None:
        self._form = form
        self._schemas: Mapping[str, Mapping[str, Any]] = {tool.name: tool.parameters for tool in tools}
        self._text = ""
        self._words = Words()
        self._marks = _Marks(form)
        # Without a mark an answer may look like a call: only the tools of the request are called then, and only by an
        # output that begins with a call.
        self._is_bare = not form.is_marked
        self._raw: list[str] = []  # read since a mark, or since the last call: text if no call follows
        self._is_open = False  # a call's opening mark was read
        self._in_section = self._is_bare
        self._in_list = False
        self._num_calls = 0  # of the section
        self._unclosed = False  # after a call whose closing mark may follow
        self._object: CallObject | None = None
        self._reader: ArgumentsReader | None = None
        self._name = ""
        self._call_id = ""
        self._due: list[str] = []  # what follows the name
        self._step: Callable[[list[ToolPart]], bool] = self._before_call if self._is_bare else self._outside

    @property
    def is_within_call(self) -> bool:
        return self._object is not None or (self._reader is not None and not self._reader.ended)

    def feed(self, text: str) -> list[ToolPart]:
        parts: list[ToolPart] = []
        self._text += text
        while self._text and self._step(parts):
            pass
        return parts

    def finish(self) -> list[ToolPart]:
        parts: list[ToolPart] = []
        if self._object is not None:
            return self._read_parts(self._object.finish())
        if self._reader is not None:
            rest = self._reader.finish()
            return [CallArguments(rest)] if rest else []
        if self._step == self._outside or self._step == self._only_text:
            if not self._begins_call():
                parts += self._words.add(self._text)
        elif self._is_bare and not self._begins_name():
            rest = "".join(self._raw) + self._text
            parts += self._words.add(rest.lstrip(f"{_SEPARATORS} \t\r\n") if self._num_calls else rest)
        elif self._raw or self._text:
            self._words.call()  # it was cut within the marks of a call
        return parts + self._words.finish()

    def _begins_call(self) -> bool:
        """Return whether a text ends within the opening marks of a call: after one of them, or after another call."""
        if self._words.is_after_call and len(self._text) > 1 and self._text[0] in "<[":
            return True
        return any(self._text.startswith(first_mark(mark)) for mark in self._marks.opening)

    def _begins_name(self) -> bool:
        """Return whether a text without marks ends within a call that may be made."""
        if self._form.optional_open and self._form.optional_open in self._raw:
            return True
        if self._step == self._read_name:
            return bool(self._text) and any(name.startswith(self._text) for name in self._schemas)
        return self._step in (self._after_name, self._after_call)

    # ---- outside of calls

    def _outside(self, parts: list[ToolPart]) -> bool:
        """Find the next opening mark."""
        marks = self._marks
        before, mark, self._text = find_marker(self._text, marks.outside_unclosed if self._unclosed else marks.outside)
        parts += self._words.add(before)
        if not mark:
            return False
        if mark in marks.opening:
            self._raw, self._num_calls = [mark], 0
            self._in_section, self._is_open = mark in marks.section, mark in marks.call
            self._step = self._read_name if mark == marks.name else self._before_call
        elif mark not in self._form.drops:
            self._unclosed = False
            self._words.call()  # the space before the closing mark belongs to the call
        return True

    def _only_text(self, parts: list[ToolPart]) -> bool:
        parts += self._words.add(self._text)
        self._text = ""
        return False

    def _no_call(self, parts: list[ToolPart]) -> bool:
        """Return as text what has turned out to be no call."""
        parts += self._words.add("".join(self._raw))
        self._raw, self._is_open, self._in_list = [], False, False
        self._unclosed = self._num_calls > 0
        self._step = self._only_text if self._is_bare else self._outside
        return True

    # ---- between the marks and the calls of a section

    def _before_call(self, parts: list[ToolPart]) -> bool:
        """Read what stands before a call, or the end of the section."""
        if not self._skip_blanks():
            return False
        char = self._text[0]
        if char == "{" and self._form.syntax != "bare" and not self._marks.name.startswith("{"):
            names = self._schemas if self._is_bare else None
            self._object, self._step = CallObject("".join(self._raw), names), self._in_object
            return True
        if self._takes_list(char) or (char in _SEPARATORS and self._num_calls and (self._in_section or self._in_list)):
            self._take(1)
            return True
        if char == "]" and self._in_list:
            return self._end_list(parts)
        found = expected(self._text, self._marks.before_call(is_open=self._is_open, in_section=self._in_section))
        if found is Expected.MAYBE:
            return False
        if found is Expected.NO:
            is_out_of_list = self._is_bare and not self._in_list
            if is_out_of_list or self._form.syntax == "json" or self._marks.name or not _NAME.match(self._text):
                return self._no_call(parts)
            self._step = self._read_name
        else:
            assert isinstance(found, str)
            self._take_mark(found, parts)
        return True

    def _takes_list(self, char: str) -> bool:
        """Return whether a bracket opens a list of calls."""
        if char != "[" or self._in_list or self._num_calls or self._form.syntax == "pairs":
            return False
        self._in_list = not self._is_bare or self._form.is_list
        return self._in_list

    def _end_list(self, parts: list[ToolPart]) -> bool:
        self._take(1)
        if not self._num_calls:
            return self._no_call(parts)
        self._in_list, self._raw = False, []
        if not self._marks.ends_section and not self._marks.ends_call:
            self._leave()
        return True

    def _take_mark(self, mark: str, parts: list[ToolPart]) -> None:
        self._take(len(mark))
        if mark in self._marks.ends_section or mark in self._marks.ends_call:
            if self._num_calls:
                self._leave()
            else:
                self._no_call(parts)
        elif mark in self._marks.call:
            self._is_open = True
        elif mark == self._marks.name:
            self._step = self._read_name

    def _leave(self) -> None:
        """End a section of calls."""
        self._raw, self._in_list, self._is_open, self._unclosed = [], False, False, False
        self._words.call()
        self._step = self._only_text if self._is_bare else self._outside

    def _take(self, size: int) -> None:
        self._raw.append(self._text[:size])
        self._text = self._text[size:]

    def _skip_blanks(self) -> bool:
        """Return whether something other than blanks has come."""
        ahead = self._text.lstrip()
        if len(ahead) < len(self._text):
            self._take(len(self._text) - len(ahead))
        return bool(ahead)

    # ---- calls

    def _in_object(self, parts: list[ToolPart]) -> bool:
        assert self._object is not None
        found, self._text = self._object.feed(self._text)
        parts += self._read_parts(found)
        if self._object.is_over:
            began, self._object, self._raw = self._object.began, None, []
            if began:
                self._end_call()
            else:
                self._no_call(parts)
        return True

    def _read_parts(self, found: Sequence[ToolPart]) -> list[ToolPart]:
        parts: list[ToolPart] = []
        for part in found:
            if isinstance(part, Content):
                parts += self._words.add(part.text)
                continue
            if isinstance(part, CallBegin):
                self._words.call()
            parts.append(part)
        return parts

    def _read_name(self, parts: list[ToolPart]) -> bool:
        if not self._skip_blanks():
            return False
        matched = _NAME.match(self._text)
        if matched is None or matched.end() > MAX_NAME:
            return self._no_call(parts)
        if matched.end() == len(self._text):
            return False  # the name may go on
        self._name, self._call_id = matched[0], ""
        if self._is_bare and self._name not in self._schemas:
            return self._no_call(parts)
        self._take(matched.end())
        self._due = list(self._marks.after_name)
        self._step = self._after_name
        return True

    def _after_name(self, parts: list[ToolPart]) -> bool:
        """Read what stands between the name and the arguments."""
        if not self._skip_blanks():
            return False
        if not self._due:
            return self._open_arguments(parts)
        if self._due[0] in (ID, INDEX):
            return self._read_id(parts)
        found = expected(self._text, self._due[:1])
        if found is Expected.MAYBE:
            return False
        if found is Expected.NO:
            if self._form.syntax != "named":
                return self._no_call(parts)
            del self._due[: 2 if self._due[1:2] in ([ID], [INDEX]) else 1]  # versions of a family leave marks out
            return True
        mark = self._due.pop(0)
        self._take(len(mark))
        if not self._due and self._form.syntax in ("python", "bare"):
            return self._open_arguments(parts)
        return True

    def _read_id(self, parts: list[ToolPart]) -> bool:
        matched = _NAME.match(self._text)
        if matched is None or matched.end() > MAX_NAME:
            return self._no_call(parts)
        if matched.end() == len(self._text):
            return False
        self._call_id = matched[0]
        if self._due.pop(0) == INDEX:
            self._call_id = self._form.call_id.replace(NAME, self._name).replace(INDEX, matched[0])
        self._take(matched.end())
        return True

    def _open_arguments(self, parts: list[ToolPart]) -> bool:
        if self._form.syntax == "named" and self._text[0] != "{":
            return self._no_call(parts)
        if self._form.syntax == "pairs":
            found = expected(self._text, self._marks.pair_or_end)
            if found is Expected.MAYBE:
                return False
            if found is Expected.NO:
                return self._no_call(parts)
        self._reader = self._new_reader()
        if self._form.syntax in ("python", "bare"):
            opening, self._raw[-1] = self._raw[-1][-1], self._raw[-1][:-1]
            self._text = opening + self._text
        self._raw = []
        self._words.call()
        parts.append(CallBegin(self._name, self._call_id))
        self._step = self._in_arguments
        return True

    def _new_reader(self) -> ArgumentsReader:
        schema = self._schemas.get(self._name, {})
        match self._form.syntax:
            case "pairs":
                return PairReader(self._form, self._marks.ends, partial(value_kind, schema))
            case "python":
                return LiteralReader(names=list(schema.get("properties") or ()))
            case "bare":
                return LiteralReader(string_mark=self._form.string_mark)
        return ObjectReader()

    def _in_arguments(self, parts: list[ToolPart]) -> bool:
        assert self._reader is not None
        written, self._text = self._reader.feed(self._text)
        if written:
            parts.append(CallArguments(written))
        if self._reader.ended:
            self._reader = None
            self._end_call()
        return True

    def _end_call(self) -> None:
        self._num_calls += 1
        self._unclosed = True
        self._due = list(self._marks.after_arguments)
        self._step = self._after_call

    def _after_call(self, parts: list[ToolPart]) -> bool:
        """Read the closing marks of a call, where they are not left out."""
        if not self._skip_blanks():
            return False
        while self._due:
            found = expected(self._text, self._due)
            if found is Expected.MAYBE:
                return False
            if found is Expected.NO:
                self._due = []
                break
            assert isinstance(found, str)
            self._text, self._raw = self._text[len(found) :], []
            del self._due[: self._due.index(found) + 1]
            if found in self._marks.ends_call and not self._in_section:
                self._leave()
                return True
            if not self._skip_blanks() and self._due:
                return False
        self._is_open = False
        if self._in_list or (self._in_section and (self._is_bare or self._marks.ends_section)):
            self._step = self._before_call
        else:
            self._no_call(parts)
        return True


class _Marks:
    """The marks of a format, without the blanks around them."""

    def __init__(self, form: ToolFormat) -> None:
        section = form.section[0].strip()
        section = section.removesuffix("[").rstrip() if form.is_list else section
        self.section = [section] if section else []
        self.call = [form.call[0].strip()] if form.call[0].strip() else []
        self.name = form.before_name.strip() if form.syntax not in ("json", "messages") else ""
        self.opening = [*self.section, *self.call]
        if self.name.startswith("<"):
            self.opening.append(self.name)  # models leave out the mark before it
        closing = form.section[1].strip()
        closing = closing.removeprefix("]").lstrip() if form.is_list else closing
        self.ends_section = [closing] if closing else []
        self.ends_call = [form.call[1].strip()] if form.call[1].strip() else []
        after = form.after_arguments.strip() if form.syntax in ("named", "pairs") else ""
        self.after_arguments = [*([after] if after else []), *self.ends_call]
        self.ends = [*self.after_arguments, *self.ends_section]
        self.pair_or_end = [*form.pair[0].split()[:1], *self.ends]
        self.after_name = [word for text in _PLACE.split(form.after_name) for word in text.split()]
        self.outside = [*self.opening, *form.drops]
        self.outside_unclosed = [*self.outside, *(mark for mark in self.ends if mark[0] in "<[")]
        self._optional = [form.optional_open] if form.optional_open else []
        self._optional += form.drops

    def before_call(self, *, is_open: bool, in_section: bool) -> list[str]:
        """Return the marks that may stand before a call."""
        marks = [*self._optional, *([self.name] if self.name else [])]
        if not is_open:
            marks += self.call
        return [*marks, *self.ends_section] if in_section else [*marks, *self.ends_call]
