"""Tools of type ``mcp`` of a request for a response: which server each one names, and the functions that the model
sees in their place."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenloom.request.errors import InvalidArgument

from .function_tools import chat_name

_MAX_HEADERS = 32
_MAX_HEADER_BYTES = 8192
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_OWN_HEADERS = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "keep-alive", "last-event-id"}
    | {"proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "cookie"}
)
"""Headers that belong to the connection, and those of the protocol, which begin with ``mcp-``."""
_OUTSIDE_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of a server, each as OpenAI's API lists it, or why they are not known."""

    tools: Sequence[Mapping[str, Any]] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call gave: the text for the model, and the error as OpenAI's API types it; None: it succeeded."""

    output: str = ""
    error: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        if self.output or self.error is None:
            return self.output
        return f"Error: {self.error.get('message', 'the call failed')}"


def protocol_error(code: int, message: str) -> dict[str, Any]:
    """Return an error of a call that reached no tool."""
    return {"type": "mcp_protocol_error", "code": code, "message": message}


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some of a server's tools. None: any."""

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def has(self, tool: Mapping[str, Any]) -> bool:
        """Return whether a listed tool is one of them."""
        hint = bool((tool.get("annotations") or {}).get("readOnlyHint"))
        return (self.names is None or tool["name"] in self.names) and self.read_only in (None, hint)


@dataclass(frozen=True, slots=True)
class McpFunction:
    """A server's tool as the model knows it."""

    label: str
    tool: str
    needs_approval: bool = True

    @property
    def name(self) -> str:
        """Its name in the chat: one of the letters and the length that functions may have."""
        name = _OUTSIDE_NAME.sub("_", chat_name(self.label, self.tool))
        if len(name) > _MAX_NAME:
            name = f"{name[: _MAX_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return name

    @classmethod
    def of_name(cls, name: str) -> "McpFunction":
        """Return the function of a call in an earlier turn, which its server offers no more."""
        label, _, tool = name.partition(".")
        return cls(label, tool)


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of type ``mcp`` whose server the operator names."""

    label: str
    """The client's name for the server."""
    server: str
    """The operator's."""
    headers: Mapping[str, str] = field(repr=False)
    """The client's, for this server only."""
    allowed: ToolFilter
    asks: ToolFilter | None
    """The tools that need the client's approval; None: those that are not in ``asks_not``."""
    asks_not: ToolFilter | None
    """The tools that need none; None: no tool."""
    takes_headers: bool
    """Whether the operator lets the client's headers through."""

    def functions(self, listing: Listing) -> list[tuple[McpFunction, dict[str, Any]]]:
        """Return the tools that the model may call, each with its definition in a chat."""
        return [self._function(tool) for tool in listing.tools if self.allowed.has(tool)]

    def _function(self, tool: Mapping[str, Any]) -> tuple[McpFunction, dict[str, Any]]:
        is_free = self.asks_not is not None and self.asks_not.has(tool)
        needs = not is_free if self.asks is None else self.asks.has(tool) or not is_free
        function = McpFunction(self.label, str(tool["name"]), needs)
        described = {"description": tool["description"]} if tool.get("description") else {}
        definition = {"name": function.name, **described, "parameters": tool["input_schema"]}
        return function, {"type": "function", "function": definition}


def read_mcp_tool(where: str, tool: Mapping[str, Any], server: str, *, takes_headers: bool) -> McpTool:
    """Return a tool whose server is named. Raises ``InvalidArgument`` naming the member.

    ``takes_headers``: as in :class:`McpTool`.
    """
    label = tool.get("server_label")
    if not isinstance(label, str) or not label:
        raise InvalidArgument(f"{where}.server_label must be a string", f"{where}.server_label")
    asks, asks_not = _approval(f"{where}.require_approval", tool.get("require_approval"))
    return McpTool(
        label=label,
        server=server,
        headers=_headers(where, tool) if takes_headers else {},
        allowed=_filter(f"{where}.allowed_tools", tool.get("allowed_tools")),
        asks=asks,
        asks_not=asks_not,
        takes_headers=takes_headers,
    )


def _approval(where: str, value: object) -> tuple[ToolFilter | None, ToolFilter | None]:
    if value in (None, "always"):
        return None, None
    if value == "never":
        return None, ToolFilter()
    if not isinstance(value, Mapping):
        raise InvalidArgument(f'{where} must be "always", "never" or an object with filters of these names', where)
    return tuple(  # type: ignore[return-value]
        None if value.get(name) is None else _filter(f"{where}.{name}", value[name]) for name in ("always", "never")
    )


def _filter(where: str, value: object) -> ToolFilter:
    names: object = value
    read_only = None
    if isinstance(value, Mapping):
        names, read_only = value.get("tool_names"), value.get("read_only")
    is_list = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    if not is_list or read_only not in (None, True, False):
        raise InvalidArgument(f"{where} must be a list of names, or have tool_names or read_only", where)
    assert names is None or isinstance(names, list)
    return ToolFilter(None if names is None else frozenset(names), read_only)


def _headers(where: str, tool: Mapping[str, Any]) -> dict[str, str]:
    """Return the client's headers for the server. Raises ``InvalidArgument`` for those that a client cannot set."""
    headers = tool.get("headers") or {}
    if not isinstance(headers, Mapping):
        raise InvalidArgument(f"{where}.headers must be an object", f"{where}.headers")
    given = {str(name).lower(): value for name, value in headers.items()}
    if (token := tool.get("authorization")) is not None:
        given["authorization"] = f"Bearer {token}"
    check_headers(f"{where}.headers", given)
    return given


def check_headers(where: str, headers: Mapping[str, object]) -> None:
    """Raise ``InvalidArgument`` for headers that a request to a server cannot have. Names are in lower case."""
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or name in _OWN_HEADERS or name.startswith(("mcp-", "sec-")):
            raise InvalidArgument(f"{where}: {name[:64]!r} cannot be set", where)
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise InvalidArgument(f"{where}: the value of {name[:64]!r} must be printable ASCII", where)
    if len(headers) > _MAX_HEADERS or sum(map(len, (*headers, *map(str, headers.values())))) > _MAX_HEADER_BYTES:
        raise InvalidArgument(f"{where} may hold {_MAX_HEADERS} headers of {_MAX_HEADER_BYTES} bytes together", where)


def shown(tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return tools as a response repeats them: without what only the server may see."""
    secret = {"headers", "authorization"}
    if not any(tool.get("type") == "mcp" and not secret.isdisjoint(tool) for tool in tools):
        return tools
    return [{name: tool[name] for name in tool if tool.get("type") != "mcp" or name not in secret} for tool in tools]


def chosen(choice: object, functions: Iterable[McpFunction]) -> object:
    """Return a choice of tools in which each tool of a server is a function, in the spelling of chats. A choice among
    tools that the servers do not have leaves the model free."""
    if not isinstance(choice, Mapping):
        return choice
    known = list(functions)
    if choice.get("type") == "mcp":
        found = _named(choice, known)
        if choice.get("name") is not None and found:
            return found[0]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": found}} if found else "auto"
    if (allowed := choice.get("allowed_tools")) is None:
        return choice
    tools = [each for tool in allowed["tools"] for each in _chosen_tools(tool, known)]
    return {**choice, "allowed_tools": {**allowed, "tools": tools}} if tools else "auto"


def loosened(choice: object) -> object:
    """Return a choice of tools, in the spelling of chats, that forces no call."""
    if choice == "required" or (isinstance(choice, Mapping) and choice.get("type") == "function"):
        return "auto"
    if isinstance(choice, Mapping) and isinstance(allowed := choice.get("allowed_tools"), Mapping):
        return {**choice, "allowed_tools": {**allowed, "mode": "auto"}}
    return choice


@dataclass(frozen=True, slots=True)
class Approval:
    """The client's answer to a request for approval.

    Attributes:
        name: Of the function, in the chat.
        arguments: As the model wrote them.
        turn: Where the result goes.
        is_given: Whether the call may be run.
        reason: The client's words about it.
    """

    call_id: str
    name: str
    arguments: str
    turn: dict[str, Any]
    is_given: bool
    reason: str


def read_approvals(items: object, turns: Sequence[dict[str, Any]]) -> list[Approval]:
    """Return the approvals in the input. Raises ``InvalidArgument`` for one of a call that the conversation has not,
    or has the result of. ``turns``: the whole conversation, in which each approval has a turn for the result."""
    approvals = []
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if item.get("type") != "mcp_approval_response":
            continue
        where = f"input[{index}].approval_request_id"
        call_id = str(item["approval_request_id"]).removeprefix("mcpr_")
        calls = [call for turn in turns for call in turn.get("tool_calls", ()) if call["id"] == call_id]
        results = [turn for turn in turns if turn.get("tool_call_id") == call_id]
        if not calls or len(results) != 1:
            raise InvalidArgument(f"{where}: the conversation has no call that waits for this approval", where)
        function, is_given = calls[-1]["function"], item.get("approve") is True
        reason = str(item.get("reason") or "")
        approvals.append(Approval(call_id, function["name"], function["arguments"], results[0], is_given, reason))
    return approvals


def _chosen_tools(tool: object, known: Sequence[McpFunction]) -> list[Any]:
    is_mcp = isinstance(tool, Mapping) and tool.get("type") == "mcp"
    return _named(tool, known) if is_mcp and isinstance(tool, Mapping) else [tool]


def _named(choice: Mapping[str, Any], known: Sequence[McpFunction]) -> list[Any]:
    label, name = choice.get("server_label"), choice.get("name")
    return [
        {"type": "function", "function": {"name": each.name}}
        for each in known
        if each.label == label and name in (None, each.tool)
    ]
