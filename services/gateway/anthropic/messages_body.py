"""Translates a body of Anthropic's Messages API into the body of a chat."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int

from ..openai.body_reader import SAMPLING_FIELDS, Body
from ..openapi.request_schemas import CountTokensRequest, MessagesRequest
from ..records.cache_marks import Blocks, anthropic_lifetimes

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


Turn = dict[str, object]
"""A turn of a chat: role, content, and what only some roles have."""

_HELD_ELSEWHERE = ("redacted_thinking",)
"""Blocks that only the service which made them can read."""


def read_turns(system: object, messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the conversation as turns of a chat. Raises ``InvalidArgument`` naming the block."""
    if not messages:
        raise InvalidArgument("messages must not be empty", "messages")
    turns: list[Turn] = []
    if system not in (None, "", []):
        turns.append({"role": "system", "content": _text_of("system", system)})
    for index, message in enumerate(messages):
        turns += _turns_of(f"messages[{index}]", message)
    return turns


def _turns_of(where: str, message: Mapping[str, Any]) -> Iterator[Turn]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidArgument(f"{where}.role must be user or assistant", f"{where}.role")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if role == "assistant":
        # An answer that only reasoned, or that ended at once, has no blocks.
        yield _assistant_turn(_blocks(f"{where}.content", content) if content else ())
        return
    blocks = _blocks(f"{where}.content", content)
    # The results of tools are turns of their own, before what the user adds to them.
    parts: list[str | dict[str, str]] = []
    for place, block in blocks:
        if block["type"] == "tool_result":
            yield _tool_turn(place, block)
        else:
            parts.append(_image(place, block) if block["type"] == "image" else _text(place, block))
    if parts:
        yield {"role": role, "content": _joined(parts)}


def _assistant_turn(blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> Turn:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for place, block in blocks:
        if block["type"] == "tool_use":
            calls.append(_call(place, block))
        elif block["type"] == "thinking":
            thoughts.append(_string(f"{place}.thinking", block.get("thinking")))
        elif block["type"] not in _HELD_ELSEWHERE:
            texts.append(_text(place, block))
    # Texts of one answer, which calls divided: joined as the model wrote them.
    turn: Turn = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(where: str, block: Mapping[str, Any]) -> dict[str, object]:
    # Any value: clients put together the arguments of a stream, which may have been cut anywhere.
    function = {"name": _string(f"{where}.name", block.get("name")), "arguments": block.get("input")}
    return {"id": _string(f"{where}.id", block.get("id")), "type": "function", "function": function}


def _tool_turn(where: str, block: Mapping[str, Any]) -> Turn:
    """Return the turn of a tool's result. A result that is an error says so in its text, as templates have no field."""
    content, parts = block.get("content"), list[str | dict[str, str]]()
    if isinstance(content, str):
        parts.append(content)
    elif content not in (None, []):
        for place, each in _blocks(f"{where}.content", content):
            parts.append(_image(place, each) if each["type"] == "image" else _text(place, each))
    if block.get("is_error"):
        parts = [f"Error: {parts[0]}", *parts[1:]] if parts and isinstance(parts[0], str) else ["Error: ", *parts]
    call_id = _string(f"{where}.tool_use_id", block.get("tool_use_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": _joined(parts)}


def _joined(parts: Sequence[str | dict[str, str]]) -> str | list[dict[str, str]]:
    """Return texts joined by line breaks; with images, the parts of a turn in their order."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _image(where: str, block: Mapping[str, Any]) -> dict[str, str]:
    from ..records.media import image_part, raw_url  # here: most conversations have none

    field, source = f"{where}.source", block.get("source")
    if not isinstance(source, dict):
        raise InvalidArgument(f"{field} must be an object with a type", field)
    match source.get("type"):
        case "base64":
            kind = _string(f"{field}.media_type", source.get("media_type"))
            return image_part(f"{field}.data", raw_url(f"{field}.data", source.get("data"), kind))
        case "url":
            return image_part(f"{field}.url", _string(f"{field}.url", source.get("url")))
    raise InvalidArgument(f"{field}.type must be base64 or url", f"{field}.type")


def _text_of(where: str, content: object) -> str:
    """Return the text of a string or of a list of text blocks; the blocks are joined by line breaks."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(place, block) for place, block in _blocks(where, content))


def _text(where: str, block: Mapping[str, Any]) -> str:
    """Return the text of a block, or of a document that is plain text."""
    kind = block["type"]
    if kind == "text":
        return _string(f"{where}.text", block.get("text"))
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(f"{where}.source.data", source.get("data"))
    message = f"{where}.type: {str(kind)[:64]!r} is not supported here; send text"
    raise InvalidArgument(message, f"{where}.type")


def _blocks(where: str, content: object) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks of a content with the place of each, for errors."""
    if not isinstance(content, list) or not content:
        raise InvalidArgument(f"{where} must be a string or a list of content blocks", where)
    blocks: list[tuple[str, Mapping[str, Any]]] = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidArgument(f"{place} must be a content block, an object with a type", place)
        blocks.append((place, block))
    return blocks


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{where} must be a string", where)
    return value
