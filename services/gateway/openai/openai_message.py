"""An assistant's turn in OpenAI's form, as it grows."""

from typing import Any

from ..assistant.parsed_message import CallDelta, MessageDelta, ParsedMessage


class AssistantMessage:
    """One output of a chat."""

    def __init__(self, parser: ParsedMessage | None) -> None:
        """``parser``: None: it is text, and no more."""
        self._parser = parser
        self._content = ""
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        """What some more text adds, as a ``delta``; without values when nothing is certain yet. ``ends``: it is the
        last."""
        delta = MessageDelta(text) if self._parser is None else self._parser.feed(text, ends=ends)
        self._content += delta.content
        self._reasoning += delta.reasoning
        told: dict[str, object] = {"content": delta.content} if delta.content or self._parser is None else {}
        told |= _reasoning(delta.reasoning)
        if delta.calls:
            told["tool_calls"] = [self._add_call(call) for call in delta.calls]
        return told

    def whole(self) -> dict[str, object]:
        """All of it, as a ``message``."""
        content = None if self._calls and not self._content else self._content
        message = {"role": "assistant", "content": content} | _reasoning(self._reasoning)
        return message | {"tool_calls": self._calls} if self._calls else message

    def _add_call(self, call: CallDelta) -> dict[str, object]:
        """As the delta tells it: who is called only once."""
        if not call.call_id:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": call.call_id, "type": "function", "function": function}
        self._calls.append(whole)
        return {"index": call.index, **whole, "function": dict(function)}


def _reasoning(text: str) -> dict[str, object]:
    """Under vLLM's name, and the one that clients knew before."""
    return {"reasoning": text, "reasoning_content": text} if text else {}
