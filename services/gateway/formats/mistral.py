"""Calls of Mistral's models: ``[TOOL_CALLS]`` and a JSON array of calls; in newer models ``name[ARGS]{…}`` for each."""

import re
import secrets
import string

from .call_object import CallList, JsonExtent
from .message_parts import CallArguments, CallBegin, Content, ToolPart, find_marker
from .tool_parser import Words

START = "[TOOL_CALLS]"
# Between a name and its arguments, in some versions: an id of the model's own, and a mark.
_HEAD = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_CUT_HEAD = re.compile(r"\s*(?:[A-Za-z0-9_.-]{1,64}\s*)?(?:\[[A-Z_]*(?:\]\s*(?:\w+\s*)?(?:\[[A-Z]*(?:\]\s*)?)?)?)?")
_LONGEST_HEAD = 160
_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return nine characters: Mistral's templates refuse other ids."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class _NamedCall:
    """Reads ``name[ARGS]{…}``; has the interface of :class:`CallList`."""

    def __init__(self) -> None:
        self.is_over = False
        self._head = ""
        self._arguments: JsonExtent | None = None

    @property
    def is_within_call(self) -> bool:
        return self._arguments is not None and not self.is_over

    def feed(self, text: str) -> tuple[list[ToolPart], str]:
        parts: list[ToolPart] = []
        if self._arguments is None:
            self._head += text
            matched = _HEAD.match(self._head)
            if matched is None:
                # It is no call: a function's name neither holds these characters nor is this long.
                self.is_over = len(self._head) > _LONGEST_HEAD or "{" in self._head or START in self._head
                return ([Content(START)], self._head) if self.is_over else ([], "")
            self._arguments = JsonExtent()
            parts.append(CallBegin(matched[1]))
            text = self._head[matched.end() :]
        written = []
        for at, char in enumerate(text):
            self._arguments.takes(char)
            written.append(self._arguments.written(char))
            if self._arguments.ended:
                self.is_over = True
                return [*parts, CallArguments("".join(written))], text[at + 1 :]
        return [*parts, CallArguments("".join(written))] if text else parts, ""

    def finish(self) -> list[ToolPart]:
        is_text = self._arguments is None and not _CUT_HEAD.fullmatch(self._head)
        return [Content(START + self._head)] if is_text else []


class MistralParser:
    """Fulfils :class:`.tool_parser.ToolParser`."""

    def __init__(self) -> None:
        self._text = ""
        self._blanks: list[str] = []  # after a mark, held until something else follows
        self._words = Words()
        self._calls: CallList | _NamedCall | None = None
        self._marked = False

    @property
    def is_within_call(self) -> bool:
        return self._calls is not None and self._calls.is_within_call

    def feed(self, text: str) -> list[ToolPart]:
        parts: list[ToolPart] = []
        if self._marked and not text.strip():
            self._blanks.append(text)
            return parts
        self._text += "".join(self._blanks) + text
        self._blanks = []
        while self._text:
            if self._calls is not None:
                found, self._text = self._calls.feed(self._text)
                parts += found
                if self._calls.is_over:
                    self._calls = None
            elif self._marked:
                if not (ahead := self._text.lstrip()):
                    self._blanks, self._text = [self._text], ""
                    break
                self._marked = False
                self._calls = CallList(START) if ahead[0] == "[" else _NamedCall()
            else:
                before, marker, self._text = find_marker(self._text, (START,))
                parts += self._words.add(before)
                if not marker:
                    break
                self._words.call()
                self._marked = True
        return parts

    def finish(self) -> list[ToolPart]:
        if self._calls is not None:
            return self._calls.finish()
        if self._marked:
            return []  # cut after the mark of a call
        return self._words.add(self._text) + self._words.finish()
