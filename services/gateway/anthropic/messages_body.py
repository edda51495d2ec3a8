"""Translates a body of Anthropic's Messages API into the body of a chat."""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int

from ..openai.body_reader import SAMPLING_FIELDS, Body
from ..openapi.request_schemas import CountTokensRequest, MessagesRequest
from ..records.cache_marks import Blocks, anthropic_lifetimes
from .message_turns import read_turns

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: Body, fields: MessagesRequest, *, reasons: bool) -> dict[str, Any]:
    """Return the chat that a body asks for, in the spelling of :class:`ChatApi`. Raises ``InvalidArgument``.

    ``reasons``: whether the model's reasoning is known, so that a budget of it can be kept.
    """
    chat: dict[str, Any] = {name: body[name] for name in body.keys() & (SAMPLING_FIELDS - {"max_tokens"})}
    chat |= conversation(fields) | _tool_choice(fields) | thinking_of(fields.thinking)
    if reasons and fields.thinking is not None and fields.thinking.get("type") == "enabled":
        chat["thinking_token_budget"] = fields.thinking.get("budget_tokens")
    chat["stop"] = fields.stop_sequences
    chat["stream"] = fields.stream
    if (form := _output_format(fields)) is not None:
        chat["response_format"] = form
    return chat | _effort(chat, fields.output_config)


def most_tokens(body: Body) -> int:
    """Return the most tokens that the client accepts. Agents name the same large number with every request, so it may
    exceed what the prompt leaves of the context."""
    if body.get("max_tokens") is None:
        raise InvalidArgument("max_tokens is required", "max_tokens")
    return narrow_int("max_tokens", body["max_tokens"], 1, 2**32 - 1)


def session(fields: MessagesRequest) -> str:
    """Return the client's name for its session; empty: it gives none. Claude Code's ``user_id`` holds the session's id.
    Raises ``InvalidArgument``."""
    name = (fields.metadata or {}).get("user_id")
    if name is not None and not isinstance(name, str):
        raise InvalidArgument("metadata.user_id must be a string", "metadata.user_id")
    return name or ""


def lifetimes(fields: MessagesRequest) -> list[int]:
    """Return the seconds of each ``cache_control`` of a request. Raises ``InvalidArgument``."""
    return anthropic_lifetimes(fields.cache_control, _marked(fields))


def _marked(fields: MessagesRequest) -> Iterator[Blocks]:
    """Yield what may hold a ``cache_control``."""
    yield "tools", fields.tools
    yield "system", fields.system
    for index, message in enumerate(fields.messages):
        content = message.get("content")
        yield f"messages[{index}].content", content
        for at, block in enumerate(content if isinstance(content, list) else ()):
            if block.get("type") == "tool_result":
                yield f"messages[{index}].content[{at}].content", block.get("content")


def previous_message(fields: MessagesRequest) -> str | None:
    """Return the id of the request whose answer the client compares with; empty: it asks for diagnostics without any;
    None: it asks for none. Raises ``InvalidArgument``."""
    if fields.diagnostics is None:
        return None
    name = fields.diagnostics.get("previous_message_id")
    if name is not None and not isinstance(name, str):
        where = "diagnostics.previous_message_id"
        raise InvalidArgument(f"{where} must be a string or null", where)
    return (name or "").removeprefix("msg_")


def conversation(fields: CountTokensRequest) -> dict[str, Any]:
    """Return what the chat template reads: the turns and the tools."""
    chat: dict[str, Any] = {"messages": read_turns(fields.system, fields.messages)}
    if _is_begun(chat["messages"][-1]):
        chat["continue_final_message"] = True
    if fields.tools:
        chat["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(fields.tools)]
    return chat


def _is_begun(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn is the beginning of the answer. A whole turn with calls, or one that only reasoned, has no
    text that could go on, and another turn of the assistant follows."""
    return turn["role"] == "assistant" and "tool_calls" not in turn and bool(turn["content"].strip())


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])[:64]
        message = f"{where}.type: {kind!r} runs at Anthropic; only custom tools, which the client runs, are supported"
        raise InvalidArgument(message, f"{where}.type")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{where}.input_schema must be a JSON schema, an object", f"{where}.input_schema")
    return {"type": "function", "function": function | {"parameters": schema}}


def _tool_choice(fields: MessagesRequest) -> dict[str, Any]:
    choice = fields.tool_choice
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        named: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        named = _CHOICES[kind]
    else:
        raise InvalidArgument("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return {"tool_choice": named, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def thinking_of(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how the chat reasons. Without ``thinking`` the template decides, and no reasoning is returned."""
    if thinking is None:
        return {"include_reasoning": False}
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidArgument("thinking.type must be enabled, adaptive or disabled", "thinking.type")
    is_on = kind != "disabled"
    return {"include_reasoning": is_on, "chat_template_kwargs": {"enable_thinking": is_on}}


def _effort(chat: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of the template, with the effort among them."""
    effort = None if config is None else config.get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise InvalidArgument("output_config.effort must be a string", "output_config.effort")
    return {"chat_template_kwargs": chat.get("chat_template_kwargs", {}) | {"reasoning_effort": effort}}


def _output_format(fields: MessagesRequest) -> dict[str, Any] | None:
    form, name = (fields.output_config or {}).get("format"), "output_config.format"
    if form is None:
        form, name = fields.output_format, "output_format"
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise InvalidArgument(f'{name} must be {{"type": "json_schema", "schema": {{…}}}}', name)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
