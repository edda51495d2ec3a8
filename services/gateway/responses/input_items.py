"""Translates the items of OpenAI's Responses API into the turns of a chat."""

import base64
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from tokenloom.request.errors import InvalidArgument

from .function_tools import chat_name
from .mcp_tools import CallOutcome
from .output_items import call_id_of, chat_name_of

Turn = dict[str, Any]
"""A turn of a chat: role, content, and what only some roles have."""

_ROLES = ("user", "assistant", "system", "developer")
_VIDEOS = ("input_video", "video_url", "video")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and the member that holds it."""


_SUMMARY = "This is a summary of the conversation before this point:"
_SEAL = "tokenloom-1:"
"""Begins the content of a compaction, which only a gateway reads."""


def compaction(item_id: str, summary: str) -> dict[str, Any]:
    """Return the item that stands for the conversation before it. The client holds the only copy."""
    sealed = _SEAL + base64.urlsafe_b64encode(summary.encode()).decode()
    return {"type": "compaction", "id": item_id, "encrypted_content": sealed}


def _summary(where: str, item: Mapping[str, Any]) -> str:
    sealed = _string(f"{where}.encrypted_content", item.get("encrypted_content"))
    try:
        if not sealed.startswith(_SEAL):
            raise ValueError(sealed)
        return base64.b64decode(sealed.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except ValueError:  # UnicodeDecodeError and binascii.Error among them
        field = f"{where}.encrypted_content"
        raise InvalidArgument(f"{field} was made by another server, or is damaged", field) from None


def items_of(value: object) -> list[dict[str, Any]]:
    """Return what :func:`read_input` reads as items that may be kept, each with an id. ``value``: was read."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    assert isinstance(items, list)
    defaults = {"type": "message", "status": "completed"}
    return [{**defaults, **item, "id": item.get("id") or f"item_{uuid4().hex}", **_content_of(item)} for item in items]


def _content_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a message in parts, as a member; empty if it is not a mere text."""
    if not isinstance(text := item.get("content"), str):
        return {}
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {"content": [{"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}]}


def read_input(value: object) -> list[Turn]:
    """Return the turns that ``input`` adds to a conversation. Raises ``InvalidArgument`` naming the item."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidArgument("input must be a text or a list of items", "input")
    turns = _Turns()
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidArgument(f"{where} must be an item, an object", where)
        turns.add(where, item)
    return turns.all


class _Turns:
    """Collects turns: the thoughts, the text and the calls of one turn of the assistant are items of their own."""

    def __init__(self) -> None:
        self.all: list[Turn] = []

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        match kind:
            case "message":
                self._add_message(where, item)
            case "reasoning":
                turn = self._assistant(lambda turn: "content" not in turn and "tool_calls" not in turn)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _thoughts(where, item)
            case "function_call":
                self._assistant(lambda turn: True).setdefault("tool_calls", []).append(_call(where, item))
            case "function_call_output":
                self.all.append(_result(where, item))
            case "compaction":
                self.all.append({"role": "user", "content": f"{_SUMMARY}\n\n{_summary(where, item)}"})
            case "mcp_list_tools":
                pass  # the gateway asks the server itself
            case "mcp_call":
                self._add_hosted(where, item)
                self.all.append({**_answered(call_id_of(item)), "content": _outcome(item)})
            case "mcp_approval_request":
                self._add_hosted(where, item)
            case "mcp_approval_response":
                given = _string(f"{where}.approval_request_id", item.get("approval_request_id"))
                self.all.append(_answered(call_id_of({"type": "mcp_approval_request", "id": given})))
            case _:
                message = f"{where}.type: {str(kind)[:64]!r} is not supported here"
                raise InvalidArgument(message, f"{where}.type")

    def _add_hosted(self, where: str, item: Mapping[str, Any]) -> None:
        """Add a call of a tool that the gateway runs."""
        for name in ("id", "server_label", "name", "arguments"):
            _string(f"{where}.{name}", item.get(name))
        function = {"name": chat_name_of(item), "arguments": item["arguments"]}
        call = {"id": call_id_of(item), "type": "function", "function": function}
        self._assistant(lambda turn: True).setdefault("tool_calls", []).append(call)

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
        content = item.get("content")
        if role != "assistant":
            self.all.append({"role": role, "content": _parts(f"{where}.content", content)})
            return
        # Text after a call belongs to the turn that made it: no result stands between them.
        turn = self._assistant(lambda turn: "content" not in turn or "tool_calls" in turn)
        text = "" if content is None else _text(f"{where}.content", content)
        turn["content"] = turn.get("content", "") + text

    def _assistant(self, has_room: Any) -> Turn:
        """Return the turn of the assistant that the item belongs to: the last one, if it has room for it."""
        if not self.all or self.all[-1]["role"] != "assistant" or not has_room(self.all[-1]):
            self.all.append({"role": "assistant"})
        return self.all[-1]


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    name = _string(f"{where}.name", item.get("name"))
    if item.get("namespace") is not None:
        name = chat_name(_string(f"{where}.namespace", item["namespace"]), name)
    function = {"name": name, "arguments": item.get("arguments")}
    return {"id": _string(f"{where}.call_id", item.get("call_id")), "type": "function", "function": function}


def _answered(call_id: str) -> Turn:
    """Return the turn for the result of a call that the client has approved or not: it is filled in later."""
    return {"role": "tool", "tool_call_id": call_id, "content": ""}


def _outcome(item: Mapping[str, Any]) -> str:
    """Return what the model has read of a call that the gateway has run."""
    if isinstance(output := item.get("output"), str) and output:
        return output
    error = item.get("error")
    if isinstance(error, dict) and isinstance(content := error.get("content"), list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return (
        "" if error is None else CallOutcome(error=error if isinstance(error, dict) else {"message": str(error)}).text
    )


def _result(where: str, item: Mapping[str, Any]) -> Turn:
    call_id = _string(f"{where}.call_id", item.get("call_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": _parts(f"{where}.output", item.get("output"))}


def _thoughts(where: str, item: Mapping[str, Any]) -> str:
    """Return the reasoning of an item; its summary if it holds only that."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InvalidArgument(f"{where}.content must be a list of parts", f"{where}.content")
    return "\n".join(_string(f"{where}.content", part.get("text")) for part in parts)


def _text(where: str, content: object) -> str:
    """Return the text of a content; its parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{where} must be a text or a list of parts", where)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _parts(where: str, content: object) -> str | list[dict[str, str]]:
    """Return the text of a content; with images or sounds, its parts."""
    if not isinstance(content, list) or not any(map(_is_media, content)):
        return _text(where, content)
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        parts.append(_media(place, part) if _is_media(part) else {"type": "text", "text": _part(place, part)})
    return parts


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_image", "input_audio")


def _media(where: str, part: Mapping[str, Any]) -> dict[str, str]:
    return _image(where, part) if part["type"] == "input_image" else _sound(where, part)


def _image(where: str, part: Mapping[str, Any]) -> dict[str, str]:
    from ..records.media import image_part, read_image  # here: most conversations have none

    if (file_id := part.get("file_id")) is not None:
        field = f"{where}.file_id"
        if part.get("image_url") is not None:
            raise InvalidArgument(f"{field} and image_url exclude each other", field)
        return {"type": "input_image", "file_id": _string(field, file_id), "field": field}
    read_image(where, _unnamed(part))
    return image_part(f"{where}.image_url", part["image_url"])


def _sound(where: str, part: Mapping[str, Any]) -> dict[str, str]:
    from ..records.media import read_sound, sound_part, sound_url  # here: most conversations have none

    read_sound(where, _unnamed(part))
    return sound_part(f"{where}.input_audio", sound_url(where, part["input_audio"]))


def _unnamed(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part without the name that other routes know, by which a client may leave a file out: a stored
    conversation names its files by their digests."""
    return {**part, "uuid": None}


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _VIDEOS:
        message = f"{where}.{kind}: this API has no videos; send it as video_url to /v1/chat/completions"
        raise InvalidArgument(message, f"{where}.{kind}")
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidArgument(f"{where}.type: {str(kind)[:64]!r} is not supported; send text", f"{where}.type")
    member = _TEXT_PARTS[kind]
    return _string(f"{where}.{member}", part.get(member))


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{where} must be a string", where)
    return value
