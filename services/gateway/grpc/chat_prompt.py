"""Chats of the public gRPC API, put into OpenAI's form so that they are read like those over HTTP."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf import json_format

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import inference_pb2

from ..formats.tool_request import MAX_TOOLS, Tool, ToolRequest, read_tool_request
from ..openai.chat import read_chat
from ..records.generate_request import Chat

if TYPE_CHECKING:
    from ..records.media import ClientFile

MAX_MESSAGES = 4096
"""Limits the turns of a chat, which are read in the event loop."""
_MODES = {
    inference_pb2.TOOL_CHOICE_MODE_NONE: "none",
    inference_pb2.TOOL_CHOICE_MODE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def read_chat_prompt(
    chat: inference_pb2.ChatPrompt, shown: Callable[[ToolRequest], Sequence[Tool]] = lambda request: request.tools
) -> tuple[Chat, ToolRequest]:
    """Return the conversation and its tools. Raises ``InvalidArgument`` naming the field.

    ``shown``: returns the tools that the model sees.
    """
    _check_count("tools", len(chat.tools), MAX_TOOLS)
    _check_count("chat.messages", len(chat.messages), MAX_MESSAGES)
    tools = [_tool(f"tools[{index}].function", tool.function) for index, tool in enumerate(chat.tools)]
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None
    request = read_tool_request(tools, _choice(chat), parallel)
    files: dict[bytes, ClientFile] = {}
    conversation = read_chat(
        [_message(f"chat.messages[{index}]", message, files) for index, message in enumerate(chat.messages)],
        shown(request),
        _template_kwargs(chat),
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        where="chat.messages",
    )
    if files:
        conversation = _with_files(conversation, files)
    if chat.mm_processor_kwargs or chat.HasField("fps"):
        conversation = _with_options(conversation, chat)
    return conversation, request


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgument(f"{field} may hold at most {most}, not {count}", field)


def _with_files(chat: Chat, files: "Mapping[bytes, ClientFile]") -> Chat:
    from ..records.media import with_files  # here: most conversations have none

    return replace(chat, media=with_files(chat.media, files))


def _with_options(conversation: Chat, chat: inference_pb2.ChatPrompt) -> Chat:
    from ..records.media import OPTIONS_FIELD, read_options  # here: most conversations have none

    options: dict[str, float] = dict(chat.mm_processor_kwargs)
    if chat.HasField("fps"):
        if "fps" in options:
            raise InvalidArgument(f"chat.fps and chat.{OPTIONS_FIELD}.fps exclude each other", "chat.fps")
        if not 0 < chat.fps < math.inf:
            raise InvalidArgument("chat.fps must be a number above 0", "chat.fps")
        options["fps"] = chat.fps
    return replace(conversation, media_options=read_options(options, f"chat.{OPTIONS_FIELD}"))


def _parts(where: str, message: inference_pb2.ChatMessage, files: "dict[bytes, ClientFile]") -> list[dict[str, str]]:
    """Return a message's parts in OpenAI's form; ``files`` gets those that they name by digest."""
    from ..records.media import (
        MODALITIES,
        ClientFile,
        data_url,
        image_part,
        sound_part,
        video_part,
    )  # here: few have any

    makers = {"image": image_part, "audio": sound_part, "video": video_part}
    kinds = {modality: kind for kind, modality in MODALITIES.items()}

    _check_count(f"{where}.parts", len(message.parts), MAX_MESSAGES)
    if message.content:
        raise InvalidArgument(f"{where}: content and parts exclude each other", f"{where}.parts")
    parts = []
    for index, part in enumerate(message.parts):
        kind, field = part.WhichOneof("part"), f"{where}.parts[{index}]"
        if kind == "text":
            parts.append({"type": "text", "text": part.text})
        elif kind is None:  # what a newer client knows, or nothing
            raise InvalidArgument(f"{field} must be a text, an image, a video or a sound", field)
        elif (make := makers.get(kind)) is not None:
            file = ClientFile.of(getattr(part, kind))
            files[file.digest] = file
            parts.append(make(f"{field}.{kind}", data_url(file, kinds[kind])))
        else:
            parts.append(makers[kind.removesuffix("_url")](f"{field}.{kind}", getattr(part, kind)))
    return parts


def _message(where: str, message: inference_pb2.ChatMessage, files: "dict[bytes, ClientFile]") -> Mapping[str, object]:
    calls = [
        {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
        for call in message.tool_calls
    ]
    texts = {name: getattr(message, name) for name in ("role", "content", "name", "tool_call_id", "reasoning")}
    if message.parts:
        return texts | {"tool_calls": calls, "content": _parts(where, message, files)}
    return texts | {"tool_calls": calls}


def _tool(where: str, function: inference_pb2.Function) -> Mapping[str, object]:
    definition: dict[str, object] = {"name": function.name}
    if function.description:
        definition["description"] = function.description
    if function.parameters:
        definition["parameters"] = _schema(f"{where}.parameters", function.parameters)
    return {"type": "function", "function": definition}


def _schema(where: str, source: str) -> object:
    try:
        return msgspec.json.decode(source)  # strict: what holds NaN or half a surrogate pair cannot be sent on
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{where} is not JSON", where) from None


def _choice(chat: inference_pb2.ChatPrompt) -> object:
    if not chat.HasField("tool_choice"):
        return None
    choice = chat.tool_choice
    if choice.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    if choice.mode not in _MODES:
        raise InvalidArgument("tool_choice must be a mode (none, auto, required) or a function's name", "tool_choice")
    return _MODES[choice.mode]


def _template_kwargs(chat: inference_pb2.ChatPrompt) -> Any:
    try:
        return _whole_numbers(json_format.MessageToDict(chat.template_kwargs))
    except (ValueError, json_format.Error) as error:  # NaN and infinities
        raise InvalidArgument(f"chat.template_kwargs: {error}", "chat.template_kwargs") from None


def _whole_numbers(value: Any) -> Any:
    """Return whole numbers as integers: a Struct has none, and a template that counts or slices needs them."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value
