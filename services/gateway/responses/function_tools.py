"""Translates the tools of a request for a response into those of a chat."""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenloom.request.errors import InvalidArgument

from ..openapi.request_schemas import ResponsesRequest

_HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "mcp",
    "tool_search",
)
"""Beginnings of the types of tools that run at OpenAI. An agent offers them with every request, whether or not its
server has them; the model is not shown what it could not call."""


def is_left_out(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool runs at OpenAI, and is therefore not shown to the model."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def tools_of(fields: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a chat about tools. Raises ``InvalidArgument`` naming the tool."""
    tools = [_tool(where, tool, namespace) for where, tool, namespace in _functions(fields)]
    choice = _choice(fields.tool_choice)
    if not tools and choice in (None, "auto", "none"):
        return {}
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": fields.parallel_tool_calls}


def chat_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a function; ``namespace`` is empty for one that is in none."""
    return f"{namespace}.{name}" if namespace else name


def namespaced(fields: ResponsesRequest) -> Mapping[str, tuple[str, str]]:
    """Return the namespace and the own name of each function in a namespace, by the name that the model knows."""
    functions = ((namespace, str(tool.get("name"))) for _, tool, namespace in _functions(fields) if namespace)
    return {chat_name(*names): names for names in functions}


def _functions(fields: ResponsesRequest) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield where each tool that the client runs stands, the tool and its namespace; raise for a namespace without a
    name or a list of tools."""
    for index, tool in enumerate(fields.tools or ()):
        where = f"tools[{index}]"
        if tool.get("type") != "namespace":
            # Agents offer web search with every request, whether or not the server has it, and refusing it would refuse
            # agents. Anthropic's API refuses such tools: its agents offer them only when they need one.
            # Those of MCP servers that the operator names are listed later (mcp_rounds.py).
            if not is_left_out(tool):
                yield where, tool, ""
            continue
        name, tools = tool.get("name"), tool.get("tools")
        if (
            not isinstance(name, str)
            or not isinstance(tools, list)
            or not all(isinstance(each, dict) for each in tools)
        ):
            raise InvalidArgument(f"{where} must have a name and tools, as a namespace has", where)
        yield from ((f"{where}.tools[{at}]", each, name) for at, each in enumerate(tools))


def _tool(where: str, tool: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:64]
        message = f"{where}.type: {kind!r} is not supported; send functions, which the client runs"
        raise InvalidArgument(message, f"{where}.type")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if namespace:
        function["name"] = chat_name(namespace, str(tool.get("name")))
    return {"type": "function", "function": function}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    """Return a choice in the form of chats, where the name of a function is one level deeper."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": {**choice, "tools": list(map(_choice, choice["tools"]))}}
    return choice
