"""From a caller's arguments to a ``GenerateRequest``. What was not given is not sent: the mesh's defaults hold."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, get_type_hints

from google.protobuf import struct_pb2

from tokenloom.offline.structured_outputs import StructuredOutputsParams
from tokenloom.request import validation
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import inference_pb2, types_pb2

from .tool_calls import Tool, ToolCall, ToolChoice, write_call, write_choice, write_tools


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: NotRequired[str | None]
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[ToolCall]]
    """Of an assistant's turn: what it called."""
    tool_call_id: NotRequired[str]
    """Of a tool's turn: the call that this is the result of."""
    reasoning: NotRequired[str]
    """Of an assistant's turn, for templates that tell it."""


class Options(TypedDict, total=False):
    """How to generate, with vLLM's names. Left out: the model's defaults, and the mesh's for the rest."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_token_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int
    """Not in streams."""
    logprob_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    repetition_detection: Mapping[str, int]
    skip_reading_prefix_cache: bool
    structured_outputs: StructuredOutputsParams
    stop: str | Sequence[str]
    n: int
    bad_words: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    ignore_eos: bool
    stream_interval: int
    truncate_prompt_tokens: int
    add_special_tokens: bool
    return_prompt_token_ids: bool
    return_timeline: bool
    priority: int
    request_id: str
    """Echoed in the call's metadata and in logs; never an identity."""


class ChatOptions(Options, total=False):
    """Of chats: what the template and the model are told beside the conversation."""

    template_kwargs: Mapping[str, Any]
    """Variables of the model's chat template, as JSON has them."""
    add_generation_prompt: bool
    """False: do not open the assistant's turn."""
    tools: Sequence[Tool]
    """What the model may call."""
    tool_choice: ToolChoice
    """Left out: ``auto`` where there are tools."""
    parallel_tool_calls: bool
    """False: one call at most."""
    include_reasoning: bool
    """False: what the model reasons is not told."""


_STRINGS = ("stop", "bad_words")
_FIELDS = {"request_id": "user_request_id"}
"""Options whose field has another name."""
_PLAIN = frozenset(
    {
        "n",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "detokenize",
        "ignore_eos",
        "stream_interval",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "return_prompt_token_ids",
        "return_timeline",
        "priority",
        "request_id",
    }
)
_KNOWN = frozenset(get_type_hints(Options))
_OF_CHATS = frozenset(get_type_hints(ChatOptions)) - _KNOWN


def prompt_request(
    prompt: str | Sequence[int], model: str | None, options: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    """For a text or token ids. Raises ``InvalidArgument`` for a value that no mesh would take."""
    request = _request(model, options)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(validation.narrow_token_ids("prompt", prompt))
    return request


def chat_request(
    messages: Sequence[Message], model: str | None, options: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    """For a conversation. Raises ``InvalidArgument``."""
    own = {name: options[name] for name in _OF_CHATS if options.get(name) is not None}
    request = _request(model, {name: value for name, value in options.items() if name not in _OF_CHATS})
    chat = inference_pb2.ChatPrompt(messages=map(_message, messages))
    if "template_kwargs" in own:
        chat.template_kwargs.CopyFrom(_struct(own["template_kwargs"]))
    if "tools" in own:
        chat.tools.extend(write_tools(own["tools"]))
    if "tool_choice" in own:
        chat.tool_choice.CopyFrom(write_choice(own["tool_choice"]))
    for name in ("add_generation_prompt", "parallel_tool_calls", "include_reasoning"):
        if name in own:
            _set(chat, name, own[name])
    request.chat.CopyFrom(chat)
    return request


def check_streamed(request: inference_pb2.GenerateRequest) -> None:
    """Refuses what pieces cannot tell: raises ``InvalidArgument``."""
    if request.sampling_params.HasField("prompt_logprobs"):
        raise InvalidArgument("prompt_logprobs are not told in a stream", "prompt_logprobs")


def _message(message: Message) -> inference_pb2.ChatMessage:
    calls = message.get("tool_calls", ())
    texts: dict[str, Any] = {name: value for name, value in message.items() if name != "tool_calls"}
    return inference_pb2.ChatMessage(**texts, tool_calls=map(write_call, calls))


def _request(model: str | None, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    for name in options:
        if name not in _KNOWN:
            raise TypeError(f"{name!r} is no option; there are {', '.join(sorted(_KNOWN))}")
    given = {name: value for name, value in options.items() if value is not None}
    request = inference_pb2.GenerateRequest(model=model or "")
    for name in _STRINGS:
        if name in given:
            getattr(request, name).extend(_strings(name, given.pop(name)))
    for name in _PLAIN & set(given):
        _set(request, name, given.pop(name))
    request.sampling_params.CopyFrom(_sampling(given))
    # Token ids are what the prompt's log probabilities are told of.
    request.return_prompt_token_ids |= request.sampling_params.HasField("prompt_logprobs")
    return request


def _sampling(given: dict[str, Any]) -> types_pb2.SamplingParams:
    structured = given.pop("structured_outputs", None)
    params = validation.narrow_sampling(given)
    if structured is not None:
        params.structured_outputs.CopyFrom(structured.to_wire())
    return params


def _set(message: inference_pb2.GenerateRequest | inference_pb2.ChatPrompt, name: str, value: object) -> None:
    try:
        setattr(message, _FIELDS.get(name, name), value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {error}", name) from None


def _strings(name: str, value: object) -> list[str]:
    if isinstance(value, str) and name == "stop":
        return [value]
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument(f"{name} must be a list of strings", name)
    return list(value)


def _struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    try:
        struct.update(dict(values))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"template_kwargs must hold JSON: {error}", "template_kwargs") from None
    return struct
