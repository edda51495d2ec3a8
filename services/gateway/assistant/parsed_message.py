"""Separates an assistant's turn into content, reasoning and tool calls while it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..formats.message_parts import CallArguments, CallBegin, Content, Part, ReasoningText
from ..formats.think import ThinkParser
from ..formats.tool_parser import ToolParser

MAX_PIECE = 4096
"""Characters that parsers are given at a time: they copy the rest of a piece for each mark in it."""


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """How the text of a turn is read. A request for plain text has no plan."""

    open_tools: Callable[[], ToolParser] | None = None
    """Makes a parser for one output; None: no tool may be called."""
    new_call_id: Callable[[], str] = str
    parallel_calls: bool = True
    open_reasoning: Callable[[bool], ThinkParser] | None = None
    """Makes a parser for one output, given whether the prompt has opened the reasoning; None: it is text."""
    include_reasoning: bool = True


@dataclass(slots=True)
class CallDelta:
    """The new part of one call."""

    index: int
    """Position among the calls of the turn."""
    call_id: str = ""
    """Set in the first delta of a call, like the name."""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class TextDelta:
    """More text for the user."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


# A list, because one piece of output may hold the end of a call and text that follows it: an API that keeps the parts
# in order would otherwise write the text before the call's last arguments.
MessageDelta = list[TextDelta | ReasoningDelta | CallDelta]
"""The new parts of a turn in the order in which the model wrote them; empty while nothing is certain."""


def text_of(delta: MessageDelta) -> str:
    """Return the text for the user, for an API that keeps it apart from the calls."""
    return "".join([part.text for part in delta if type(part) is TextDelta])


def reasoning_of(delta: MessageDelta) -> str:
    """Return the reasoning, for an API that keeps it apart from the text."""
    return "".join([part.text for part in delta if type(part) is ReasoningDelta])


def calls_of(delta: MessageDelta) -> list[CallDelta]:
    """Return the parts of calls, for an API that keeps them apart from the text."""
    return [part for part in delta if type(part) is CallDelta]


class OutputReader:
    """Reads one output by a plan; without a plan all of it is content.

    Attributes:
        is_plain: Whether there is no plan.
    """

    def __init__(self, plan: MessagePlan | None, *, reasoning_is_open: bool, may_reason: bool) -> None:
        """The arguments are those of :class:`ParsedMessage`."""
        self._parser: ParsedMessage | None = None
        if plan is not None:
            self._parser = ParsedMessage(plan, reasoning_is_open=reasoning_is_open, may_reason=may_reason)
        self.is_plain = plan is None

    @property
    def is_within_call(self) -> bool:
        """Return whether the output ends within a call."""
        return self._parser is not None and self._parser.is_within_call

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """Return what more text adds. ``ends``: it is the last text."""
        if self._parser is not None:
            return self._parser.feed(text, ends=ends)
        return [TextDelta(text)] if text else []


class ParsedMessage:
    """Reads one output.

    Attributes:
        num_calls: Calls that have begun.
    """

    def __init__(self, plan: MessagePlan, *, reasoning_is_open: bool, may_reason: bool = True) -> None:
        """``reasoning_is_open``: the prompt has opened the reasoning. ``may_reason``: False if the output has none."""
        self.num_calls = 0
        self._plan = plan
        self._tools = plan.open_tools and plan.open_tools()
        self._thoughts = plan.open_reasoning(reasoning_is_open) if plan.open_reasoning and may_reason else None
        self._skips_call = False

    @property
    def is_within_call(self) -> bool:
        """Return whether the output ends within a call."""
        return self._tools is not None and self._tools.is_within_call

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """Return what more text adds. ``ends``: it is the last text."""
        delta: MessageDelta = []
        while len(text) > MAX_PIECE:
            self._add(delta, self._parts(text[:MAX_PIECE], ends=False))
            text = text[MAX_PIECE:]
        self._add(delta, self._parts(text, ends=ends))
        return delta

    def _add(self, delta: MessageDelta, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(words):
                    _grow(delta, TextDelta, words)
                case ReasoningText(words):
                    if self._plan.include_reasoning:
                        _grow(delta, ReasoningDelta, words)
                case CallBegin(name):
                    self._begin_call(delta, name)
                case CallArguments(more):
                    self._add_arguments(delta, more)

    def _parts(self, text: str, *, ends: bool) -> Sequence[Part]:
        parts: list[Part] = []
        if self._thoughts is None:
            self._read_content(text, parts)
        else:
            thoughts = self._thoughts.feed(text) + (self._thoughts.finish() if ends else [])
            for part in thoughts:
                if isinstance(part, Content):
                    self._read_content(part.text, parts)
                else:
                    parts.append(part)
        if ends and self._tools is not None:
            parts += self._tools.finish()
        return parts

    def _read_content(self, text: str, parts: list[Part]) -> None:
        if self._tools is not None:
            parts += self._tools.feed(text)
        elif text:
            parts.append(Content(text))

    def _begin_call(self, delta: MessageDelta, name: str) -> None:
        self._skips_call = self.num_calls > 0 and not self._plan.parallel_calls
        if not self._skips_call:
            delta.append(CallDelta(self.num_calls, self._plan.new_call_id(), name))
            self.num_calls += 1

    def _add_arguments(self, delta: MessageDelta, text: str) -> None:
        if self._skips_call or not text:
            return
        last = delta[-1] if delta else None
        if not isinstance(last, CallDelta):
            last = CallDelta(self.num_calls - 1)
            delta.append(last)
        last.arguments += text


def _grow(delta: MessageDelta, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
    """Add text to the last part if it is of this kind, otherwise as a part of its own."""
    last = delta[-1] if delta else None
    if isinstance(last, kind):
        last.text += text
    elif text:
        delta.append(kind(text))
