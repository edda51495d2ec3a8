"""An assistant's turn of which reasoning and tool calls are told apart, in OpenAI's form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .parts import CallArguments, CallBegin, Content, Part, Reasoning
from .reasoning.think import ThinkParser
from .tools.parser import ToolParser


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


class ParsedMessage:
    """One output's turn, as it grows.

    Attributes:
        num_calls: That began.
    """

    def __init__(self, plan: MessagePlan, *, reasoning_is_open: bool) -> None:
        self.num_calls = 0
        self._plan = plan
        self._tools = plan.open_tools and plan.open_tools()
        self._thoughts = plan.open_reasoning and plan.open_reasoning(reasoning_is_open)
        self._content = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._skips_call = False

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        """What some more text adds, as a ``delta``; empty when nothing is certain yet. ``ends``: it is the last."""
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for part in self._parts(text, ends=ends):
            match part:
                case Content(words):
                    self._content += words
                    delta["content"] = delta.get("content", "") + words
                case Reasoning(words):
                    self._add_reasoning(delta, words)
                case CallBegin() | CallArguments():
                    self._add_call(calls, part)
        return delta | {"tool_calls": calls} if calls else delta

    def whole(self) -> dict[str, object]:
        """All of it, as a ``message``."""
        content = None if self._calls and not self._content else self._content
        message: dict[str, object] = {"role": "assistant", "content": content}
        if self._reasoning:
            message |= {"reasoning": self._reasoning, "reasoning_content": self._reasoning}
        return message | {"tool_calls": self._calls} if self._calls else message

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

    def _add_reasoning(self, delta: dict[str, Any], words: str) -> None:
        if not self._plan.include_reasoning:
            return
        self._reasoning += words
        for name in ("reasoning", "reasoning_content"):  # vLLM's name, and the one that clients knew before
            delta[name] = delta.get(name, "") + words

    def _add_call(self, told: list[dict[str, Any]], part: CallBegin | CallArguments) -> None:
        """``told``: what the delta says of calls so far, one entry each."""
        if isinstance(part, CallBegin):
            self._skips_call = self.num_calls > 0 and not self._plan.parallel_calls
            if self._skips_call:
                return
            call_id = self._plan.new_call_id()
            function = {"name": part.name, "arguments": ""}
            self._calls.append({"id": call_id, "type": "function", "function": function})
            told.append({"index": self.num_calls, "id": call_id, "type": "function", "function": dict(function)})
            self.num_calls += 1
        elif not self._skips_call:
            self._calls[-1]["function"]["arguments"] += part.text
            index = self.num_calls - 1
            if not told or told[-1]["index"] != index:
                told.append({"index": index, "function": {"arguments": ""}})
            told[-1]["function"]["arguments"] += part.text
