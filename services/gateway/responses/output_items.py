"""Divides an output into items of OpenAI's Responses API, and makes the events that report how they grow."""

from collections.abc import Mapping
from typing import Any

from ..assistant.message_plans import CallDelta, MessageDelta, TextDelta
from ..encoding.sse import encode_json
from .function_tools import chat_name


class Events:
    """Makes server-sent events, each with its number."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **members: object) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._next, **members})
        self._next += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class OutputItems:
    """Holds the items of an output, of which one is open at a time.

    Attributes:
        events: Makes the events.
        items: The items; the last one is complete once it has ended.
    """

    def __init__(self, request_id: str, namespaced: Mapping[str, tuple[str, str]]) -> None:
        """``namespaced``: the namespace and the own name of each function in a namespace, by its name in the chat."""
        self.events = Events()
        self._namespaced = namespaced
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._pieces: list[str] = []  # the text of the open item
        self._is_open = False

    def add(self, delta: MessageDelta) -> bytes:
        """Return the events of what the output grew by."""
        events = b""
        for part in delta:
            if isinstance(part, CallDelta):
                events += self._add_call(part)
            elif isinstance(part, TextDelta):
                events += self._begin("message", {"role": "assistant", "content": []})
                events += self._grow("response.output_text.delta", part.text)
            else:
                events += self._begin("reasoning", {"summary": [], "content": []})
                events += self._grow("response.reasoning_text.delta", part.text)
        return events

    def end(self, status: str = "completed") -> bytes:
        """Return the events that end the open item, if any. ``status``: of that item."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        self._pieces = []
        item["status"] = status
        place = self._place()
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self.events.event("response.function_call_arguments.done", **place, arguments=text)
        else:
            events = self._end_part(item, text, place)
        return events + self.events.event("response.output_item.done", output_index=place["output_index"], item=item)

    def turn(self) -> dict[str, Any]:
        """Return the whole output as a turn of the conversation."""
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items:
            if item["type"] == "function_call":
                name = chat_name(item.get("namespace", ""), item["name"])
                function = {"name": name, "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            elif item["type"] == "reasoning":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item["content"][0]["text"]
            else:
                turn["content"] += item["content"][0]["text"]
        return turn

    def _add_call(self, call: CallDelta) -> bytes:
        events = b""
        if call.call_id:
            events = self.end()
            events += self._begin("function_call", {"call_id": call.call_id, **self._named(call.name), "arguments": ""})
        if call.arguments:
            events += self._grow("response.function_call_arguments.delta", call.arguments)
        return events

    def _named(self, name: str) -> dict[str, str]:
        """Return a function's name as the client knows it, and its namespace if it is in one."""
        namespace, own = self._namespaced.get(name, ("", name))
        return {"name": own, "namespace": namespace} if namespace else {"name": own}

    def _begin(self, kind: str, members: dict[str, Any]) -> bytes:
        """Return the events that open an item of this kind; none if one is open."""
        if self._is_open and self.items[-1]["type"] == kind:
            return b""
        ended = self.end()
        index = len(self.items)
        item = {"type": kind, "id": f"{kind}_{self._request_id}_{index}", "status": "in_progress", **members}
        self.items.append(item)
        self._is_open = True
        added = self.events.event("response.output_item.added", output_index=index, item=item)
        if kind == "function_call":
            return ended + added
        return ended + added + self._part("response.content_part.added", "")

    def _grow(self, kind: str, text: str) -> bytes:
        self._pieces.append(text)
        more: dict[str, object] = {"logprobs": []} if kind == "response.output_text.delta" else {}
        return self.events.event(kind, **self._place(), delta=text, **more)

    def _end_part(self, item: dict[str, Any], text: str, place: dict[str, Any]) -> bytes:
        """Complete the only part of an item, and return the events that say so."""
        item["content"] = [_part_of(item, text)]
        if item["type"] == "reasoning":
            done = self.events.event("response.reasoning_text.done", **place, text=text)
        else:
            done = self.events.event("response.output_text.done", **place, text=text, logprobs=[])
        return done + self._part("response.content_part.done", text)

    def _part(self, kind: str, text: str) -> bytes:
        return self.events.event(kind, **self._place(), part=_part_of(self.items[-1], text))

    def _place(self) -> dict[str, Any]:
        """Return where the open item's text stands."""
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == "function_call" else place | {"content_index": 0}


def _part_of(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
