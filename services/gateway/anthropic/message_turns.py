"""Translates the turns of Anthropic's Messages API into those of a chat."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenloom.request.errors import InvalidArgument

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
