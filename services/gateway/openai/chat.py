"""``/v1/chat/completions``: reads bodies, and narrows conversations, which other APIs have too, to what chat templates
accept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenloom.request import errors
from tokenloom.request.chat_template import past_arguments
from tokenloom.v1 import types_pb2

from ..assistant.message_plans import MessagePlans
from ..encoding import sse
from ..formats.call_arguments import raw_arguments
from ..formats.tool_request import NO_TOOLS, Tool, read_tool_request
from ..generation.running_generation import RunningGeneration
from ..openapi.request_schemas import ChatCompletionRequest
from ..records.cache_marks import BREAKPOINT, OPTIONS, openai_seconds
from ..records.generate_request import Chat, GenerateRequest
from ..tenants.tenant import Tenant
from .answer import AnswerBase, ChatAnswer
from .body_reader import (
    AnswerOptions,
    Body,
    BodyReader,
    ignored_in_chat,
    ignored_members,
    make_generate_request,
    sampling_params,
)
from .event_ids import IdKind

if TYPE_CHECKING:
    from ..records.media import MediaPart


@dataclass(frozen=True, slots=True)
class ChatApi:
    """Reads bodies of the endpoint and makes its answers."""

    reader: BodyReader
    plans: MessagePlans
    event_ids = IdKind.POSITION

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, ChatCompletionRequest)
        if fields.add_special_tokens:
            raise errors.InvalidArgument(
                "add_special_tokens is not supported for chats: the template adds its own", "add_special_tokens"
            )
        request = NO_TOOLS
        if fields.tools is not None or fields.tool_choice is not None:
            request = read_tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        sampling, lost, names = _sampling(body, fields)
        if request.tools and request.is_forced and sampling.HasField("structured_outputs"):
            lost = tuple(name for name in ("response_format", "structured_outputs") if body.get(name) is not None)
            names["structured_outputs"] = "tools"
        chat = read_chat(
            fields.messages,
            self.plans.shown(request),
            template_kwargs(fields),
            fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
        )
        if fields.mm_processor_kwargs:
            chat = _with_options(chat, fields.mm_processor_kwargs)
        generate_request = make_generate_request(fields, chat, "messages", sampling, tenant)
        shows = fields.include_reasoning is not False and not (fields.reasoning or {}).get("exclude")
        plan, unbound = self.plans.apply(request, generate_request, include_reasoning=shows)
        ignored = (*self.reader.ignored(body, ChatCompletionRequest), *ignored_in_chat(body), *lost, *unbound)
        if fields.prompt_cache_options is not None or _MARK in ignored:
            generate_request = replace(generate_request, keep_seconds=_keep_seconds(fields))
            others = ignored_members(OPTIONS, (fields.prompt_cache_options,), _CACHE_OPTIONS)
            ignored = tuple(name for name in (*ignored, *others) if name != _MARK)
        if request.tools and "structured_outputs" not in names and body.get("structured_outputs") is None:
            names["structured_outputs"] = "tools"  # constrained, if at all, to calls that are forced or strict
        return generate_request, AnswerOptions.of(fields, sampling, plan=plan, ignored=ignored, field_names=names)

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> ChatAnswer:
        return ChatAnswer(AnswerBase(generation, options, "chatcmpl", generation.model, "chat.completion.chunk"))


_MARK = f"messages[].content[].{BREAKPOINT}"
_CACHE_OPTIONS = frozenset({"mode", "ttl"})


def _keep_seconds(fields: ChatCompletionRequest) -> int:
    parts = ((f"messages[{at}].content", turn.get("content")) for at, turn in enumerate(fields.messages))
    return openai_seconds(fields.prompt_cache_options, parts)


def _with_options(chat: Chat, options: Mapping[str, object]) -> Chat:
    from ..records.media import read_options  # here: most requests have none

    return replace(chat, media_options=read_options(options))


def _sampling(
    body: Body, fields: ChatCompletionRequest
) -> tuple[types_pb2.SamplingParams, tuple[str, ...], dict[str, str]]:
    """Return the sampling parameters, the keywords of a schema that do not bind the output, and which fields of the
    client the parameters come from where the names differ.

    ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins; ``logprobs`` asks for the token's own,
    ``top_logprobs`` for alternatives.
    """
    own: dict[str, object] = {}
    names: dict[str, str] = {}
    if body.get("response_format") is not None and body.get("structured_outputs") is None:
        names["structured_outputs"] = "response_format"
    if fields.max_completion_tokens is not None:
        own["max_tokens"] = fields.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if fields.vllm_xargs is not None:
        own["extra_args"], names["extra_args"] = fields.vllm_xargs, "vllm_xargs"
    if fields.logprobs:
        own["logprobs"] = 0
        if fields.top_logprobs is not None:
            own["logprobs"], names["logprobs"] = fields.top_logprobs, "top_logprobs"
    elif fields.top_logprobs is not None and (fields.top_logprobs != 0 or fields.top_logprobs is False):
        raise errors.InvalidArgument("top_logprobs needs logprobs to be true", "top_logprobs")
    try:
        sampling, lost = sampling_params(body, **own)
    except errors.InvalidArgument as error:
        raise error.renamed(names) from error
    return sampling, lost, names


def template_kwargs(fields: ChatCompletionRequest) -> dict[str, Any]:
    """Return the variables of the chat template; those of ``chat_template_kwargs`` win. Raises ``InvalidArgument``."""
    kwargs: dict[str, Any] = {}
    if fields.documents:
        kwargs["documents"] = fields.documents
    effort = fields.reasoning_effort or (_member(fields, "reasoning", "effort", str) if fields.reasoning else None)
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    if fields.reasoning and (enabled := _member(fields, "reasoning", "enabled", bool)) is not None:
        kwargs["enable_thinking"] = enabled
    if fields.thinking and (kind := _member(fields, "thinking", "type", str)) is not None:
        if kind not in ("enabled", "disabled", "adaptive"):
            raise errors.InvalidArgument("thinking.type must be enabled, adaptive or disabled", "thinking.type")
        kwargs["enable_thinking"] = kind != "disabled"
    return kwargs | (fields.chat_template_kwargs or {})


def _member(fields: ChatCompletionRequest, field: str, name: str, kind: type) -> Any:
    """Return a member of a field that is an object; None if either is not set."""
    value = (getattr(fields, field) or {}).get(name)
    if value is not None and type(value) is not kind:
        article = "a boolean" if kind is bool else "a string"
        raise errors.InvalidArgument(f"{field}.{name} must be {article}", f"{field}.{name}")
    return value


ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("name", "tool_call_id")
# A turn that only called tools or only reasoned, and a tool that returned nothing, come without a content, with null or
# with no parts, depending on the client.
_MAY_BE_EMPTY = ("assistant", "tool")
_TEXT_PARTS = ("text", "refusal")
"""Types of parts, whose text is in a member of the same name."""
_IMAGE, _SOUND = {"type": "image"}, {"type": "audio", "audio": ""}
_MARKS = {
    "image_url": _IMAGE,
    "input_image": _IMAGE,
    "input_audio": _SOUND,
    "audio_url": _SOUND,
    "video_url": {"type": "video"},
}
"""What chat templates read in place of parts. The published one of Qwen2-Audio looks for the key alone."""
_OTHER_VIDEOS = ("video", "input_video")


def read_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    *,
    continue_final_message: bool | None = None,
    where: str = "messages",
) -> Chat:
    """Return a conversation for the tokenizer. Raises ``InvalidArgument`` naming the part below ``where``."""
    if not messages:
        raise errors.InvalidArgument(f"{where} must not be empty", where)
    turns, has_answers, media = [], False, list["MediaPart"]()
    for index, message in enumerate(messages):
        turns.append(_message(f"{where}[{index}]", message, media))
        has_answers = has_answers or message["role"] == "assistant"
    if continue_final_message and add_generation_prompt:
        conflict = "continue_final_message excludes add_generation_prompt, which begins another turn"
        raise errors.InvalidArgument(conflict, "continue_final_message")
    return Chat(
        messages_json=sse.encode_json(turns),
        tools_json=sse.encode_json([tool.definition for tool in tools]) if tools else b"",
        template_kwargs_json=sse.encode_json(template_kwargs) if template_kwargs else b"",
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
        has_answers=has_answers,
        media=media,
    )


def _message(where: str, message: Mapping[str, Any], media: "list[MediaPart]") -> dict[str, object]:
    """Return one turn as templates accept it: role, text, and what only some roles have. Its images and sounds are
    added to ``media``."""
    role = message.get("role")
    if role not in ROLES:
        raise errors.InvalidArgument(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    for part in ("function_call", "audio") if role == "assistant" else ("function_call", "audio", "tool_calls"):
        if message.get(part):
            raise errors.InvalidArgument(f"{where}.{part} is not supported yet", f"{where}.{part}")
    turn: dict[str, object] = {"role": role}
    calls = _tool_calls(f"{where}.tool_calls", message.get("tool_calls")) if role == "assistant" else []
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal")
    if isinstance(content, str):
        turn["content"] = content
    elif content in (None, []) and role in _MAY_BE_EMPTY:
        turn["content"] = ""
    else:
        turn["content"] = _join_parts(f"{where}.content", content, media)
    if calls:
        turn["tool_calls"] = calls
    # vLLM has renamed reasoning_content to reasoning; templates use the older name.
    for name in (*_TEXTS, "reasoning_content", "reasoning") if role == "assistant" else _TEXTS:
        value = message.get(name)
        if value is not None and (text := _string(f"{where}.{name}", value)):
            turn["reasoning_content" if name == "reasoning" else name] = text
    return turn


def _join_parts(where: str, content: object, media: "list[MediaPart]") -> str | list[dict[str, str]]:
    """Return the text of a turn that is sent in parts; they are joined by line breaks, as in vLLM. With images or
    sounds, it remains in parts, of which the chat template puts each in its place."""
    if not isinstance(content, list) or not content:
        raise errors.InvalidArgument(f"{where} must be a string or a list of text parts", where)
    parts, num_before = [], len(media)
    for index, part in enumerate(content):
        parts.append(_part(f"{where}[{index}]", part, media))
    if len(media) == num_before:
        return "\n".join(text for text in parts if isinstance(text, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(where: str, part: object, media: "list[MediaPart]") -> str | dict[str, str]:
    """Return the text of a part; the mark of an image or a sound, which is added to ``media``."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise errors.InvalidArgument(f"{where} must be an object with type and text", where)
    kind = part.get("type")
    if isinstance(kind, str) and (mark := _MARKS.get(kind)) is not None:
        from ..records.media import read_part  # here: most conversations have none

        media.append(read_part(where, part))
        return mark
    if kind in _OTHER_VIDEOS:
        raise errors.InvalidArgument(f"{where}.{kind}: send a video as a part of type video_url", f"{where}.{kind}")
    if kind not in _TEXT_PARTS:
        reason = f"{str(kind)[:64]!r} is not supported; send text, image_url, video_url or input_audio"
        raise errors.InvalidArgument(f"{where}.type: {reason}", f"{where}.type")
    return _string(f"{where}.{kind}", part.get(kind))


def _tool_calls(where: str, calls: object) -> list[dict[str, object]]:
    """Return the calls of a past turn."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise errors.InvalidArgument(f"{where} must be a list of tool calls", where)
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    is_function = isinstance(call, dict) and call.get("type") in (None, "function")
    if not isinstance(call, dict) or not isinstance(function, dict) or not is_function:
        raise errors.InvalidArgument(f'{where} must be {{"id": …, "type": "function", "function": {{…}}}}', where)
    name = _string(f"{where}.function.name", function.get("name"))
    arguments = past_arguments(function.get("arguments"))
    if isinstance(arguments, dict):
        arguments = raw_arguments(arguments)
    turn: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = call.get("id")
    return turn | {"id": _string(f"{where}.id", call_id)} if call_id not in (None, "") else turn


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise errors.InvalidArgument(f"{where} must be a string", where)
    return value
