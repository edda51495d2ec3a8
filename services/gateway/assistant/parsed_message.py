"""Separates an assistant's turn into content, reasoning and tool calls while it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
class MessageDelta:
    """The new part of a turn; empty while nothing is certain."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


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

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """Return what more text adds. ``ends``: it is the last text."""
        return MessageDelta(text) if self._parser is None else self._parser.feed(text, ends=ends)


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

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """Return what more text adds. ``ends``: it is the last text."""
        delta = MessageDelta()
        while len(text) > MAX_PIECE:
            self._add(delta, self._parts(text[:MAX_PIECE], ends=False))
            text = text[MAX_PIECE:]
        self._add(delta, self._parts(text, ends=ends))
        return delta

    def _add(self, delta: MessageDelta, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(words):
                    delta.content += words
                case ReasoningText(words):
                    delta.reasoning += words if self._plan.include_reasoning else ""
                case CallBegin(name):
                    self._begin_call(delta.calls, name)
                case CallArguments(more):
                    self._add_arguments(delta.calls, more)

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

    def _begin_call(self, calls: list[CallDelta], name: str) -> None:
        self._skips_call = self.num_calls > 0 and not self._plan.parallel_calls
        if not self._skips_call:
            calls.append(CallDelta(self.num_calls, self._plan.new_call_id(), name))
            self.num_calls += 1

    def _add_arguments(self, calls: list[CallDelta], text: str) -> None:
        if self._skips_call:
            return
        index = self.num_calls - 1
        if not calls or calls[-1].index != index:
            calls.append(CallDelta(index))
        calls[-1].arguments += text
