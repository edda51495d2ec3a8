"""An assistant's turn of which reasoning and tool calls are told apart, as it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..reasoning.think import ThinkParser
from ..tools.tool_parser import ToolParser
from .message_parts import CallArguments, CallBegin, Content, Part, Reasoning


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """How the text of a turn is to be read; of a request that asks for no more than text there is none."""

    open_tools: Callable[[], ToolParser] | None = None
    """A parser for one output; None: no tool may be called."""
    new_call_id: Callable[[], str] = str
    parallel_calls: bool = True
    open_reasoning: Callable[[bool], ThinkParser] | None = None
    """A parser for one output, given whether the prompt has opened the reasoning; None: it is no matter of its own."""
    include_reasoning: bool = True


@dataclass(slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    """Counts the calls of the turn."""
    call_id: str = ""
    """With the first piece, like the name."""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """What is new of a turn; empty while nothing is certain."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ParsedMessage:
    """One output's turn.

    Attributes:
        num_calls: That began.
    """

    def __init__(self, plan: MessagePlan, *, reasoning_is_open: bool) -> None:
        self.num_calls = 0
        self._plan = plan
        self._tools = plan.open_tools and plan.open_tools()
        self._thoughts = plan.open_reasoning and plan.open_reasoning(reasoning_is_open)
        self._skips_call = False

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """What some more text adds. ``ends``: it is the last."""
        delta = MessageDelta()
        for part in self._parts(text, ends=ends):
            match part:
                case Content(words):
                    delta.content += words
                case Reasoning(words):
                    delta.reasoning += words if self._plan.include_reasoning else ""
                case CallBegin(name):
                    self._begin_call(delta.calls, name)
                case CallArguments(more):
                    self._add_arguments(delta.calls, more)
        return delta

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

    def _begin_call(self, told: list[CallDelta], name: str) -> None:
        self._skips_call = self.num_calls > 0 and not self._plan.parallel_calls
        if not self._skips_call:
            told.append(CallDelta(self.num_calls, self._plan.new_call_id(), name))
            self.num_calls += 1

    def _add_arguments(self, told: list[CallDelta], text: str) -> None:
        if self._skips_call:
            return
        index = self.num_calls - 1
        if not told or told[-1].index != index:
            told.append(CallDelta(index))
        told[-1].arguments += text
