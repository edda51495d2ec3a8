"""``/v1/chat/completions``: reading bodies, shaping answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.v1 import types_pb2

from ..runtime import errors
from . import sse
from .answer import AnswerBase, finish_reason
from .collector import Delta
from .generation import Generation
from .job import Chat, Job
from .openai_models import Body, BodyReader, CommonFields, Options, sampling_params, text_options

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """A chat body, but for the sampling parameters."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatApi:
    """The endpoint, for one served model."""

    def __init__(self, reader: BodyReader, model: str) -> None:
        self._reader = reader
        self._model = model

    def read(self, body: Body) -> tuple[Job, Options]:
        fields = self._reader.read(body, ChatFields)
        sampling = _sampling(body, fields)
        prompt = Chat(
            messages_json=read_messages(fields.messages, "messages"),
            template_kwargs_json=sse.encode_json(fields.chat_template_kwargs) if fields.chat_template_kwargs else b"",
            add_generation_prompt=fields.add_generation_prompt is not False,
        )
        text = text_options(fields)
        job = Job(prompt, "messages", sampling, text, ignore_eos=bool(fields.ignore_eos), priority=fields.priority or 0)
        return job, Options.of(fields, sampling)

    def answer(self, generation: Generation, options: Options) -> "ChatAnswer":
        return ChatAnswer(AnswerBase(generation, options, "chatcmpl", self._model))


class ChatAnswer:
    """One conversation's next turn."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer("chat.completion.chunk")
        self._text = ""
        self._token_ids: list[int] = []
        # What makes an event without text worth sending.
        self._tells_all = base.options.return_token_ids or base.options.continuous_usage
        self._text_event = self._writer.text_event(0, b'"delta":{"content":', b"}")

    def first_events(self) -> bytes:
        extra = b""
        if self._base.options.return_token_ids:
            extra = b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompts[0]))
        role = sse.choice(0, b'"delta":{"role":"assistant","content":""}')
        return self._writer.event(role, extra, self._base.usage_of(0))

    def events(self, delta: Delta) -> bytes:
        if delta.finished is None and not self._tells_all:
            return self._text_event(delta.text) if delta.text else b""
        events = b""
        if delta.text or (self._tells_all and delta.token_ids):
            ids = sse.token_ids_member(delta.token_ids) if self._base.options.return_token_ids else b""
            content = b'"delta":{"content":%b}' % sse.encode_json(delta.text)
            events = self._writer.event(sse.choice(0, content, extra=ids), usage=self._base.usage_of(0))
        if delta.finished is not None:
            finish = sse.encode_json(finish_reason(delta.finished))
            stop = b',"stop_reason":' + sse.encode_json(self._base.stop_reason(delta.finished))
            choice = sse.choice(0, b'"delta":{}', finish, stop)
            timeline = b"" if self._base.options.include_usage else members(self._base.timeline())
            events += self._writer.event(choice, timeline, self._base.usage_of(0))
        return events

    def last_events(self) -> bytes:
        if not self._base.options.include_usage:
            return b""
        return self._writer.event(b"", members(self._base.timeline()), self._base.generation.usage)

    def add(self, delta: Delta) -> None:
        self._text += delta.text
        self._token_ids += delta.token_ids

    def body(self) -> bytes:
        finished = self._base.generation.finished[0]
        choice: dict[str, object] = {
            "index": 0,
            "message": {"role": "assistant", "content": self._text},
            "logprobs": None,
            "finish_reason": finish_reason(finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        response = self._base.head("chat.completion")
        if self._base.options.return_token_ids:
            choice["token_ids"] = self._token_ids
            response["prompt_token_ids"] = list(self._base.generation.prompts[0])
        return sse.encode_json(response | {"choices": [choice]} | self._base.tail())


def members(values: dict[str, object]) -> bytes:
    """Further members of a JSON object, with their leading comma."""
    return b"," + sse.encode_json(values)[1:-1] if values else b""


def read_messages(messages: Sequence[Mapping[str, Any]], where: str) -> bytes:
    """A conversation as JSON for the tokenizer. Raises :class:`errors.InvalidArgument` naming the part."""
    if not messages:
        raise errors.InvalidArgument(f"{where} must not be empty", where)
    return sse.encode_json([_message(f"{where}[{index}]", message) for index, message in enumerate(messages)])


def _sampling(body: Body, fields: ChatFields) -> types_pb2.SamplingParams:
    """``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""
    if fields.max_completion_tokens is None:
        return sampling_params(body)
    try:
        return sampling_params({**body, "max_tokens": fields.max_completion_tokens})
    except errors.InvalidArgument as error:
        if error.field == "max_tokens":
            error.field = "max_completion_tokens"
        raise


def _message(where: str, message: Mapping[str, Any]) -> dict[str, str]:
    """One turn as templates take it: role and text."""
    role = message.get("role")
    if role not in ROLES:
        raise errors.InvalidArgument(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    for part in ("tool_calls", "function_call", "audio"):
        if message.get(part):
            raise errors.InvalidArgument(f"{where}.{part} is not supported yet", f"{where}.{part}")
    turn = {"role": role, "content": _content(f"{where}.content", message.get("content"))}
    if not message.get("name"):
        return turn
    if not isinstance(message["name"], str):
        raise errors.InvalidArgument(f"{where}.name must be a string", f"{where}.name")
    return turn | {"name": message["name"]}


def _content(where: str, content: object) -> str:
    """A string as it is; parts of text joined by line breaks, as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise errors.InvalidArgument(f"{where} must be a string or a list of text parts", where)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise errors.InvalidArgument(f"{where} must be an object with type and text", where)
    if part.get("type") != "text":
        raise errors.InvalidArgument(f"{where}.type: only text is supported yet", f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise errors.InvalidArgument(f"{where}.text must be a string", f"{where}.text")
    return text
