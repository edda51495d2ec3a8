"""Finds out in which form a chat template writes the words of each role.

Some templates read the content of a turn as a text, some as a list of parts, and some leave out the turns of roles that
they do not know. Rendered wrongly, a turn is lost without an error. So each template is tried with words that occur
nowhere else. A trial that raises says nothing, because templates may test what a turn says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from .chat_template import ChatTemplate, TemplateForms, TemplateRefused, TemplateTooLong

MAX_LITERALS = 48
"""Texts of a template that are tried with the words, for templates that write only what begins with such a text."""
_SYSTEM, _USER, _ASSISTANT, _TOOL = "system", "user", "assistant", "tool"
_NAME, _CALL_ID = "lookup", "callid001"
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}]
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": {}}}
_LONG = " and this is a whole sentence, so that a template which asks for some length has enough of it to read."

_Message = Mapping[str, Any]
_Conversation = Callable[[str], Sequence[_Message]]
"""Returns a conversation in which one turn says the given words."""


class _Fate(IntEnum):
    """What became of the words in one form."""

    LOST = 0
    UNKNOWN = 1
    KEPT = 2


def probe_forms(template: ChatTemplate) -> TemplateForms:
    """Return the forms that keep the words. Raises ``ValueError`` if a user's turn is lost in every form."""
    probe = _Probe(template)
    if probe.choose(_USER, lambda words: [_turn(_USER, words)]) is _Fate.LOST:
        raise ValueError(
            "the chat template leaves out the words of a user's turn, whether content is a text or a list of parts"
        )
    probe.choose(_ASSISTANT, lambda words: [_turn(_USER, "hi"), _turn(_ASSISTANT, words), _turn(_USER, "go on")])
    probe.choose(_SYSTEM, lambda words: [_turn(_SYSTEM, words), _turn(_USER, "hi")])
    if template.knows_developers:
        probe.choose("developer", lambda words: [_turn("developer", words), _turn(_USER, "hi")])
    probe.choose(_TOOL, _tool_result)
    late = probe.fate(
        lambda words: [_turn(_USER, "hi"), _turn(_ASSISTANT, "yes"), _turn(_SYSTEM, words), _turn(_USER, "go on")]
    )
    return TemplateForms(frozenset(probe.in_parts), frozenset(probe.lost), late is _Fate.LOST)


def _turn(role: str, words: str) -> _Message:
    return {"role": role, "content": words}


def _tool_result(words: str) -> Sequence[_Message]:
    call = {"role": _ASSISTANT, "content": "", "tool_calls": [_CALL]}
    return [_turn(_USER, "hi"), call, {**_turn(_TOOL, words), "name": _NAME, "tool_call_id": _CALL_ID}]


class _Probe:
    """Tries conversations, and remembers what it learns of each role."""

    def __init__(self, template: ChatTemplate) -> None:
        self.in_parts: set[str] = set()
        self.lost: set[str] = set()
        self._template = template
        self._word = "zephyrix"
        while self._word in template.source.lower():
            self._word += "x"

    def choose(self, role: str, conversation: _Conversation) -> _Fate:
        """Choose the form of a role's words, and return what becomes of them in it."""
        as_text = self.fate(conversation)
        if as_text is _Fate.KEPT:
            return as_text
        self.in_parts.add(role)
        in_parts = self.fate(conversation)
        if in_parts <= as_text:
            self.in_parts.discard(role)
        best = max(as_text, in_parts)
        if best is _Fate.LOST:
            self.lost.add(role)
        return best

    def fate(self, conversation: _Conversation) -> _Fate:
        """Return what becomes of the words, in the forms that are chosen so far."""
        fates = set()
        for words in self._sentinels():
            fates.add(fate := self._try(conversation(words)))
            if fate is _Fate.KEPT:
                return fate
        return _Fate.LOST if _Fate.LOST in fates else _Fate.UNKNOWN

    def _try(self, messages: Sequence[_Message]) -> _Fate:
        shaped = [self._shape(message) for message in messages]
        tools = _TOOLS if any(message["role"] == _TOOL for message in messages) else None
        try:
            text = self._template.render(shaped, tools)
        except (TemplateRefused, TemplateTooLong, MemoryError):
            return _Fate.UNKNOWN
        return _Fate.KEPT if self._word in text.lower() else _Fate.LOST

    def _shape(self, message: _Message) -> _Message:
        if message["role"] not in self.in_parts:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _sentinels(self) -> Iterator[str]:
        """Yield words to try: first plain ones, then with the texts that the template may compare them with."""
        yield self._word
        yield self._word + _LONG
        for text in [text for text in self._template.literals() if text.strip()][:MAX_LITERALS]:
            yield from (text + self._word, f"{text}{self._word}{text}", self._word + text)
