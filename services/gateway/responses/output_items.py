"""Divides an output into items of OpenAI's Responses API, and makes the events that report how they grow."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..assistant.message_plans import CallDelta, MessageDelta, TextDelta
from ..encoding.sse import encode_json
from .function_tools import chat_name
from .mcp_tools import CallOutcome, Listing, McpFunction

_PREFIXES = {"mcp_call": "mcp_", "mcp_approval_request": "mcpr_"}
"""What stands before the id of a call in the id of its item."""
_CALLS = ("function_call", *_PREFIXES)


class Events:
    """Makes server-sent events, each with its number."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **members: object) -> bytes:
        data = encode_json({"type": kind, "sequence_number": self._next, **members})
        self._next += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def go_on(self, number: int) -> None:
        """Give this number to the next event: another gateway has written those before it."""
        self._next = number


class OutputItems:
    """Holds the items of an output, of which one is open at a time.

    Attributes:
        events: Makes the events.
        items: The items; the last one is complete once it has ended.
        hosted: The tools of MCP servers, by their name in the chat; the gateway runs them.
        to_run: The calls of these whose arguments are complete, and which have no result yet.
    """

    def __init__(self, request_id: str, namespaced: Mapping[str, tuple[str, str]]) -> None:
        """``namespaced``: the namespace and the own name of each function in a namespace, by its name in the chat."""
        self.events = Events()
        self.hosted: dict[str, McpFunction] = {}
        self.to_run: list[dict[str, Any]] = []
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
        place = self._place()
        if item["type"] == "mcp_approval_request":
            item["arguments"] = text
            added = self.events.event("response.output_item.added", output_index=place["output_index"], item=item)
            return added + self._done(item)
        if item["type"] == "mcp_call":
            return self._end_hosted(item, text, status)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self.events.event("response.function_call_arguments.done", **place, arguments=text)
        else:
            events = self._end_part(item, text, place)
        return events + self._done(item)

    def turn(self, start: int = 0) -> dict[str, Any]:
        """Return the output from an item on as a turn of the conversation."""
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items[start:]:
            if item["type"] in _CALLS:
                function = {"name": chat_name_of(item), "arguments": item["arguments"]}
                call = {"id": call_id_of(item), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            elif item["type"] == "reasoning":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item["content"][0]["text"]
            else:
                turn["content"] += item["content"][0]["text"]
        return turn

    def list_tools(self, label: str) -> bytes:
        """Return the events that say that a server is asked for its tools."""
        members: dict[str, Any] = {"server_label": label, "tools": [], "error": None}
        events = self._begin("mcp_list_tools", members)
        self._is_open = False
        return events + self.events.event("response.mcp_list_tools.in_progress", **self._place())

    def end_list(self, listing: Listing, tools: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the events that end the list begun last. ``tools``: those that the model sees."""
        item = self.items[-1]
        item |= {"tools": list(tools), "error": listing.error}
        kind = "completed" if listing.error is None else "failed"
        return self.events.event(f"response.mcp_list_tools.{kind}", **self._place()) + self._done(item)

    def add_approved(self, call_id: str, function: McpFunction, arguments: str) -> bytes:
        """Return the events of a call that the client has approved, which is to be run."""
        begun = self.end() + self._begin_hosted("mcp_call", call_id, function)
        self.items[-1]["approval_request_id"] = f"{_PREFIXES['mcp_approval_request']}{call_id}"
        return begun + self._grow("response.mcp_call_arguments.delta", arguments) + self.end()

    def end_call(self, item: dict[str, Any], outcome: CallOutcome) -> bytes:
        """Return the events that end a call of :attr:`to_run`."""
        self.to_run.remove(item)
        kind = "completed" if outcome.error is None else "failed"
        item |= {"status": kind, "error": outcome.error, "output": outcome.output if outcome.error is None else None}
        place = {"item_id": item["id"], "output_index": self.items.index(item)}
        return self.events.event(f"response.mcp_call.{kind}", **place) + self._done(item)

    def _add_call(self, call: CallDelta) -> bytes:
        events = b""
        if call.call_id:
            events = self.end()
            if (function := self.hosted.get(call.name)) is not None:
                kind = "mcp_approval_request" if function.needs_approval else "mcp_call"
                events += self._begin_hosted(kind, call.call_id, function)
            else:
                members = {"call_id": call.call_id, **self._named(call.name), "arguments": ""}
                events += self._begin("function_call", members)
        if call.arguments and self.items[-1]["type"] == "mcp_approval_request":
            self._pieces.append(call.arguments)
        elif call.arguments:
            events += self._grow(f"response.{self.items[-1]['type']}_arguments.delta", call.arguments)
        return events

    def _begin_hosted(self, kind: str, call_id: str, function: McpFunction) -> bytes:
        """Return the events that open a call of a server's tool; none for one that waits for the client's approval,
        which is shown when it is complete."""
        item: dict[str, Any] = {"type": kind, "id": f"{_PREFIXES[kind]}{call_id}", "server_label": function.label}
        item |= {"name": function.tool, "arguments": ""}
        self.items.append(item)
        self._is_open = True
        if kind == "mcp_approval_request":
            return b""
        item |= {"status": "in_progress", "approval_request_id": None, "output": None, "error": None}
        added = self.events.event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        return added + self.events.event("response.mcp_call.in_progress", **self._place())

    def _end_hosted(self, item: dict[str, Any], text: str, status: str) -> bytes:
        item["arguments"] = text
        events = self.events.event("response.mcp_call_arguments.done", **self._place(), arguments=text)
        if status == "completed":
            self.to_run.append(item)
            return events
        item["status"] = status
        return events + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        return self.events.event("response.output_item.done", output_index=self.items.index(item), item=item)

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
        if kind in ("function_call", "mcp_list_tools"):
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
        return place | {"content_index": 0} if item["type"] in ("message", "reasoning") else place


def call_id_of(item: Mapping[str, Any]) -> str:
    """Return the id by which the conversation knows the call that an item is, or asks the client to approve."""
    if item["type"] == "function_call":
        return str(item["call_id"])
    return str(item["id"]).removeprefix(_PREFIXES[item["type"]])


def chat_name_of(item: Mapping[str, Any]) -> str:
    """Return the name by which the model knows the function that an item calls."""
    if item["type"] == "function_call":
        return chat_name(item.get("namespace", ""), item["name"])
    return McpFunction(item["server_label"], item["name"]).name


def _part_of(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
