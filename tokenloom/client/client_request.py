"""Turns a caller's arguments into a ``GenerateRequest``. Omitted options keep the mesh's defaults."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.message import Message as ProtoMessage

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import MAX_TTFT_DEADLINE, TTFT_DEADLINE
from tokenloom.request.narrowing import SAMPLING_NAMES, narrow, narrow_sampling, narrow_token_ids
from tokenloom.request.sampling_params import GenerationFields
from tokenloom.v1 import inference_pb2

from .options import ChatOptions, Message, Options, Prompt
from .tool_calls import write_calls, write_choice, write_tools

_OF_TABLE = frozenset(GenerationFields.__struct_fields__)
_KNOWN = frozenset({"model", *Options.__struct_fields__})
_OF_BEAMS = frozenset({"use_beam_search", "length_penalty"})
_OF_CHATS = frozenset(ChatOptions.__struct_fields__) - _KNOWN
_SOUND_BYTES = 256 << 10
"""Of a sound in one message."""


def prompt_request(prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Return the request for a text or token ids. Raises ``InvalidArgument`` for a value that no mesh accepts."""
    request = _request(options)
    if isinstance(prompt, str):
        set_field(request, "text", prompt, "prompt")
    else:
        request.token_ids.ids.extend(narrow_token_ids("prompt", prompt))
    return request


def transcribe_requests(sound: bytes, options: Mapping[str, Any]) -> list[inference_pb2.TranscribeRequest]:
    """Return the messages that send a sound. Raises ``InvalidArgument``, and ``TypeError`` for an option that is
    none."""
    asked = inference_pb2.TranscribeOptions()
    for name, value in options.items():
        if name not in asked.DESCRIPTOR.fields_by_name:
            raise TypeError(f"{name!r} is not an option of this call")
        if value is not None:
            set_field(asked, name, value)
    if not isinstance(sound, bytes):
        raise InvalidArgument("sound must be the bytes of a file", "sound")
    parts = (sound[start : start + _SOUND_BYTES] for start in range(0, len(sound), _SOUND_BYTES))
    first = inference_pb2.TranscribeRequest(options=asked)
    return [first, *(inference_pb2.TranscribeRequest(data=part) for part in parts)]


def chat_request(messages: Sequence[Message], options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Return the request for a conversation. Raises ``InvalidArgument``."""
    own = {name: options[name] for name in _OF_CHATS if options.get(name) is not None}
    request = _request({name: value for name, value in options.items() if name not in _OF_CHATS})
    chat = inference_pb2.ChatPrompt()
    if not isinstance(messages, Sequence):
        raise InvalidArgument("messages must be a list of messages", "messages")
    for index, message in enumerate(messages):
        _add_message(chat, message, f"messages[{index}]")
    if "template_kwargs" in own:
        chat.template_kwargs.CopyFrom(_struct(own["template_kwargs"]))
    if "tools" in own:
        chat.tools.extend(write_tools(own["tools"]))
    if "tool_choice" in own:
        chat.tool_choice.CopyFrom(write_choice(own["tool_choice"]))
    if "mm_processor_kwargs" in own:
        _set_processor(chat, own["mm_processor_kwargs"])
    for name in ("add_generation_prompt", "parallel_tool_calls", "include_reasoning"):
        if name in own:
            set_field(chat, name, own[name])
    request.chat.CopyFrom(chat)
    return request


def _set_processor(chat: inference_pb2.ChatPrompt, options: Mapping[str, float]) -> None:
    """Set the options of the model's processor, of which a fraction of ``fps`` has a field of its own."""
    if isinstance(options, Mapping) and isinstance(rate := options.get("fps"), float):
        set_field(chat, "fps", rate, "mm_processor_kwargs.fps")
        options = {name: value for name, value in options.items() if name != "fps"}
    set_field(chat, "mm_processor_kwargs", options)


def check_streamed(request: inference_pb2.GenerateRequest) -> None:
    """Refuse options that streams do not support. Raises ``InvalidArgument``."""
    if request.sampling_params.HasField("prompt_logprobs"):
        raise InvalidArgument("prompt_logprobs are not available in a stream", "prompt_logprobs")
    if request.HasField("beam_search"):
        raise InvalidArgument("use_beam_search is not available in a stream", "use_beam_search")


def set_field(message: ProtoMessage, name: str, value: object, field: str = "") -> None:
    """Set a field to a value of the caller. ``field``: what the caller calls it; empty: the same.

    Raises ``InvalidArgument`` for a value that the field cannot hold.
    """
    field = field or name
    value = narrow(name, value) if name in _OF_TABLE else value
    try:
        if isinstance(value, list | tuple):
            getattr(message, name).extend(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{field}: {error}", field) from None


def _add_message(chat: inference_pb2.ChatPrompt, message: Message, where: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidArgument(f"{where} must be a mapping with role and content", where)
    turn = chat.messages.add()
    for name, value in message.items():
        if name == "tool_calls":
            turn.tool_calls.extend(write_calls(value, f"{where}.tool_calls"))
        elif name == "content" and isinstance(value, list | tuple):
            for at, part in enumerate(value):
                _add_part(turn, part, f"{where}.content[{at}]")
        elif value is not None:
            set_field(turn, name, value, f"{where}.{name}")


_PARTS = {"text": "text", "image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
"""By their types in OpenAI's form, what parts are called here."""


def _add_part(turn: inference_pb2.ChatMessage, part: object, where: str) -> None:
    """Add a text, the bytes of an image, or a part in OpenAI's form: a text, an image, a video or a sound."""
    if isinstance(part, str | bytes):
        set_field(turn.parts.add(), "text" if isinstance(part, str) else "image", part, where)
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _PARTS:
        raise InvalidArgument(
            f"{where} must be a text, the bytes of an image, or a part of type {', '.join(_PARTS)}",
            where,
        )
    if kind == "text":
        set_field(turn.parts.add(), "text", part.get("text"), f"{where}.text")
        return
    value = part.get(kind)
    if kind == "input_audio":
        data = value.get("data") if isinstance(value, Mapping) else None
        set_field(turn.parts.add(), "audio", _of_base64(data, f"{where}.input_audio.data"), where)
        return
    url = value.get("url") if isinstance(value, Mapping) else value
    head, mark, data = str(url).partition(";base64,")
    if kind == "video_url" and "," in data:  # a list of pictures, which is sent as it is
        set_field(turn.parts.add(), "video", str(url).encode(), where)
    elif mark and head.startswith("data:"):
        set_field(turn.parts.add(), _PARTS[kind], _of_base64(data, f"{where}.{kind}"), where)
    else:
        set_field(turn.parts.add(), kind, url, f"{where}.{kind}")


def _of_base64(data: object, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidArgument(f"{where} is not base64", where) from None


def _request(options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    sampling = {}
    for name, value in options.items():
        if name not in _KNOWN:
            raise TypeError(f"{name!r} is not an option; expected {', '.join(sorted(_KNOWN))}")
        if name in SAMPLING_NAMES:
            sampling[name] = value
        elif name == TTFT_DEADLINE:
            _set_ttft_deadline(request, value)
        elif value is not None and name not in _OF_BEAMS:
            set_field(request, "user_request_id" if name == "request_id" else name, value, name)
    request.sampling_params.CopyFrom(narrow_sampling(sampling))
    _set_beam_search(request, options)
    # The prompt's log probabilities are returned by token id.
    request.return_prompt_token_ids |= request.sampling_params.HasField("prompt_logprobs")
    return request


def _set_ttft_deadline(request: inference_pb2.GenerateRequest, seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TTFT_DEADLINE:
        raise InvalidArgument(
            f"{TTFT_DEADLINE} must be a number of seconds above 0 and at most {MAX_TTFT_DEADLINE}, not {seconds!r}",
            TTFT_DEADLINE,
        )
    request.ttft_deadline.FromNanoseconds(round(seconds * 1e9))


def _set_beam_search(request: inference_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    penalty = options.get("length_penalty")
    if options.get("use_beam_search"):
        request.beam_search.SetInParent()
        if penalty is not None:
            set_field(request.beam_search, "length_penalty", penalty)
    elif penalty is not None:
        raise InvalidArgument("length_penalty needs use_beam_search", "length_penalty")


def _struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    try:
        struct.update(dict(values))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"template_kwargs must hold JSON: {error}", "template_kwargs") from None
    return struct
