"""What a client of each API does: it writes a conversation in the API's form, and puts the answer together.

An answer is kept as the API returned it, and sent back like that. For the other APIs it is written anew from its parts,
as the libraries that translate between APIs do.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.services.gateway.fakes import MODEL

Native = Any
"""An answer in the form of one API."""


@dataclass(frozen=True)
class Part:
    """A part of an answer: ``text``, ``thought`` or ``call``. Of a call, ``text`` holds the arguments."""

    kind: str
    text: str
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation."""

    role: str
    texts: tuple[str, ...] = ()
    """Of the system, the user and a tool, in parts."""
    call: Part | None = None
    """That a tool answers."""
    parts: tuple[Part, ...] = ()
    """Of an answer."""
    native: dict[str, Native] = field(default_factory=dict)
    """The answer as it is sent, by the name of the API."""


@dataclass(frozen=True)
class Asked:
    """What a request has besides the conversation."""

    tools: Sequence[dict[str, Any]] = ()
    """In the form of chats."""
    choice: str = "auto"
    """``auto``, ``required`` or the name of the only tool that may be called."""
    stream: bool = False
    share: float = 1.0
    """Of the stream's events, that arrive before the client loses the connection."""


class Dialect(Protocol):
    """One API."""

    name: str

    async def ask(self, turns: Sequence[Turn], asked: Asked) -> Native:
        """Return the answer. Raises ``Refused``."""

    def read(self, native: Native) -> list[Part]:
        """Return the parts of an answer."""

    def write(self, parts: Sequence[Part]) -> Native:
        """Return an answer in the API's form."""


class Refused(Exception):
    """Raised for a request that an API refuses."""


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    response = await http.post(path, json=body)
    if response.status_code != 200:
        raise Refused(f"{path}: {response.status_code} {response.text[:300]} for {json.dumps(body)[:3000]}")
    return response


def events(response: httpx.Response, share: float) -> Iterator[dict[str, Any]]:
    """The first events of a stream, without its end mark."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    yield from map(json.loads, lines[: round(len(lines) * share)])


def joined(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def calls(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.kind == "call"]


def value_of(arguments: str) -> Any:
    """The arguments as a client holds them that wants an object: what cannot be read is left as it is."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Chats:
    """``/v1/chat/completions``."""

    name = "chat"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, turns: Sequence[Turn], asked: Asked) -> Native:
        body: dict[str, Any] = {"model": MODEL, "messages": [self._message(turn) for turn in turns]}
        if asked.tools:
            body |= {"tools": asked.tools, "tool_choice": _choice(asked.choice)}
        if not asked.stream:
            response = await post(self._http, "/v1/chat/completions", body)
            return response.json()["choices"][0]["message"]
        response = await post(self._http, "/v1/chat/completions", body | {"stream": True})
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
        for event in events(response, asked.share):
            for choice in event["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                message["reasoning"] += delta.get("reasoning") or ""
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append(call)
                    else:
                        function = message["tool_calls"][call["index"]]["function"]
                        function["arguments"] += call["function"]["arguments"]
        return message

    def _message(self, turn: Turn) -> dict[str, Any]:
        if turn.role == "assistant":
            return dict(turn.native["chat"])
        content: Any = [{"type": "text", "text": text} for text in turn.texts]
        content = turn.texts[0] if len(turn.texts) == 1 else content
        message = {"role": turn.role, "content": content}
        return message if turn.call is None else message | {"tool_call_id": turn.call.call_id}

    def read(self, native: Native) -> list[Part]:
        thoughts = native.get("reasoning") or native.get("reasoning_content")
        parts = [Part("thought", thoughts)] if thoughts else []
        parts += [Part("text", native["content"])] if native.get("content") else []
        functions = ((call["id"], call["function"]) for call in native.get("tool_calls") or ())
        return [*parts, *(Part("call", each["arguments"], each["name"], own_id) for own_id, each in functions)]

    def write(self, parts: Sequence[Part]) -> Native:
        message: dict[str, Any] = {"role": "assistant", "content": joined(parts, "text")}
        if thoughts := joined(parts, "thought"):
            message["reasoning_content"] = thoughts
        if made := calls(parts):
            message["tool_calls"] = [
                {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.text}}
                for each in made
            ]
        return message


def _choice(choice: str) -> Any:
    return choice if choice in ("auto", "required") else {"type": "function", "function": {"name": choice}}


class Messages:
    """``/v1/messages``."""

    name = "messages"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, turns: Sequence[Turn], asked: Asked) -> Native:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 100_000, "thinking": {"type": "adaptive"}}
        body["messages"] = self._turns(turns)
        if systems := [turn for turn in turns if turn.role == "system"]:
            body["system"] = [{"type": "text", "text": text} for text in systems[0].texts]
        if asked.tools:
            functions = [tool["function"] for tool in asked.tools]
            body["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
            kind = {"auto": "auto", "required": "any"}.get(asked.choice)
            body["tool_choice"] = {"type": kind} if kind else {"type": "tool", "name": asked.choice}
        if not asked.stream:
            return (await post(self._http, "/v1/messages", body)).json()["content"]
        return self._together(await post(self._http, "/v1/messages", body | {"stream": True}), asked.share)

    def _together(self, response: httpx.Response, share: float) -> Native:
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for event in events(response, share):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                texts.append("")
            elif event["type"] == "content_block_delta":
                assert event["index"] == len(blocks) - 1, event
                delta = event["delta"]
                kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                texts[-1] += delta[kind[delta["type"]]]
                expected = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use"}
                assert blocks[-1]["type"] == expected[delta["type"]], event
        for block, text in zip(blocks, texts, strict=True):
            if block["type"] == "tool_use":
                block["input"] = value_of(text)
            else:
                block[block["type"]] = text
        return blocks

    def _turns(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        written: list[dict[str, Any]] = []
        for turn in turns:
            if turn.role == "assistant":
                written.append({"role": "assistant", "content": turn.native["messages"]})
                continue
            if turn.role == "system":
                continue
            blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in turn.texts]
            if turn.call is not None:
                blocks = [{"type": "tool_result", "tool_use_id": turn.call.call_id, "content": blocks}]
            if written and written[-1]["role"] == "user":
                written[-1]["content"] += blocks
            else:
                written.append({"role": "user", "content": blocks})
        return written

    def read(self, native: Native) -> list[Part]:
        parts = []
        for block in native:
            match block["type"]:
                case "thinking":
                    parts.append(Part("thought", block["thinking"]))
                case "text":
                    parts.append(Part("text", block["text"]))
                case "tool_use":
                    parts.append(Part("call", text_of(block["input"]), block["name"], block["id"]))
        return parts

    def write(self, parts: Sequence[Part]) -> Native:
        blocks: list[dict[str, Any]] = []
        for part in parts:
            match part.kind:
                case "thought":
                    blocks.append({"type": "thinking", "thinking": part.text, "signature": ""})
                case "text":
                    blocks.append({"type": "text", "text": part.text})
                case "call":
                    own = {"id": part.call_id, "name": part.name, "input": value_of(part.text)}
                    blocks.append({"type": "tool_use", **own})
        return blocks


class Responses:
    """``/v1/responses``, with items or, where ``refers`` is set, with the id of the last response.

    Attributes:
        last_id: Of the last response.
    """

    name = "responses"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.last_id = ""

    async def ask(self, turns: Sequence[Turn], asked: Asked, refers: str = "") -> Native:
        """``refers``: the id of the response that the last answer is."""
        body: dict[str, Any] = {"model": MODEL, "store": True, "max_output_tokens": 100_000}
        if refers:
            answers = [at for at, turn in enumerate(turns) if turn.role == "assistant"]
            body |= {"previous_response_id": refers, "input": self._items(turns[answers[-1] + 1 :])}
        else:
            body["input"] = self._items(turns)
        if systems := [turn for turn in turns if turn.role == "system"]:
            body["instructions"] = "\n".join(systems[0].texts)
        if asked.tools:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in asked.tools]
            is_mode = asked.choice in ("auto", "required")
            body["tool_choice"] = asked.choice if is_mode else {"type": "function", "name": asked.choice}
        if not asked.stream:
            response = (await post(self._http, "/v1/responses", body)).json()
            self.last_id = response["id"]
            return response["output"]
        return self._together(await post(self._http, "/v1/responses", body | {"stream": True}), asked.share)

    def _together(self, response: httpx.Response, share: float) -> Native:
        items: list[dict[str, Any]] = []
        texts: list[str] = []
        for event in events(response, share):
            kind = event["type"]
            if kind == "response.output_item.added":
                items.append(event["item"])
                texts.append("")
            elif kind.endswith(".delta"):
                assert event["item_id"] == items[-1]["id"], event
                assert ("arguments" in kind) == (items[-1]["type"] == "function_call"), event
                texts[-1] += event["delta"]
            elif kind == "response.output_item.done":
                items[-1] = event["item"]
                assert texts[-1] == (event["item"].get("arguments") or _text(event["item"])), event
            elif "response" in event:
                self.last_id = event["response"]["id"]
        if items and items[-1]["status"] == "in_progress":
            if items[-1]["type"] == "function_call":
                items[-1]["arguments"] = texts[-1]
            elif texts[-1]:
                kind = "reasoning_text" if items[-1]["type"] == "reasoning" else "output_text"
                items[-1]["content"] = [{"type": kind, "text": texts[-1]}]
        return items

    def _items(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for turn in turns:
            content = [{"type": "input_text", "text": text} for text in turn.texts]
            if turn.role == "assistant":
                items += turn.native["responses"]
            elif turn.call is not None:
                output = turn.texts[0] if len(turn.texts) == 1 else content
                items.append({"type": "function_call_output", "call_id": turn.call.call_id, "output": output})
            elif turn.role != "system":
                items.append({"type": "message", "role": turn.role, "content": content})
        return items

    def read(self, native: Native) -> list[Part]:
        parts = []
        for item in native:
            match item["type"]:
                case "reasoning":
                    parts.append(Part("thought", _text(item)))
                case "message":
                    parts.append(Part("text", _text(item)))
                case "function_call":
                    parts.append(Part("call", item["arguments"], item["name"], item["call_id"]))
        return parts

    def write(self, parts: Sequence[Part]) -> Native:
        items: list[dict[str, Any]] = []
        for part in parts:
            match part.kind:
                case "thought":
                    content = [{"type": "reasoning_text", "text": part.text}]
                    items.append({"type": "reasoning", "summary": [], "content": content})
                case "text":
                    content = [{"type": "output_text", "text": part.text}]
                    items.append({"type": "message", "role": "assistant", "content": content})
                case "call":
                    own = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                    items.append({"type": "function_call", **own})
        return items


def _text(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item.get("content", ()))


class Ollama:
    """``/api/chat``. Calls have no ids there; the results follow in their order."""

    name = "ollama"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, turns: Sequence[Turn], asked: Asked) -> Native:
        messages = [self._message(turn) for turn in turns]
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "think": True, "stream": asked.stream}
        response = await post(self._http, "/api/chat", body | ({"tools": asked.tools} if asked.tools else {}))
        whole: dict[str, Any] = {"role": "assistant", "content": ""}
        lines = response.text.splitlines()
        for line in lines[: round(len(lines) * asked.share)]:
            message = json.loads(line)["message"]
            whole["content"] += message["content"]
            if thoughts := message.get("thinking"):
                whole["thinking"] = whole.get("thinking", "") + thoughts
            if made := message.get("tool_calls"):
                whole["tool_calls"] = [*whole.get("tool_calls", ()), *made]
        return whole

    def _message(self, turn: Turn) -> dict[str, Any]:
        if turn.role == "assistant":
            return dict(turn.native["ollama"])
        message: dict[str, Any] = {"role": turn.role, "content": "\n".join(turn.texts)}
        return message if turn.call is None else message | {"tool_name": turn.call.name}

    def read(self, native: Native) -> list[Part]:
        parts = [Part("thought", native["thinking"])] if native.get("thinking") else []
        parts += [Part("text", native["content"])] if native.get("content") else []
        functions = [call["function"] for call in native.get("tool_calls", ())]
        return [*parts, *(Part("call", text_of(each["arguments"]), each["name"], "") for each in functions)]

    def write(self, parts: Sequence[Part]) -> Native:
        message: dict[str, Any] = {"role": "assistant", "content": joined(parts, "text")}
        if thoughts := joined(parts, "thought"):
            message["thinking"] = thoughts
        if made := calls(parts):
            functions = [{"name": each.name, "arguments": value_of(each.text)} for each in made]
            message["tool_calls"] = [{"function": function} for function in functions]
        return message
