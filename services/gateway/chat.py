"""``/v1/chat/completions``: reading bodies, shaping answers."""

from typing import Any

from tokenloom.v1 import types_pb2

from ..runtime import errors
from . import sse
from .answer import AnswerBase, finish_reason
from .collector import Delta
from .generation import Generation
from .job import Chat, Job
from .logprobs import chat_content
from .messages import read_messages
from .openai_models import Body, BodyReader, CommonFields, Options, make_job, sampling_params


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """A chat body, but for the sampling parameters."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Any = None


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
        if fields.add_special_tokens:
            raise errors.InvalidArgument(
                "add_special_tokens is not supported for chats: the template has its own", "add_special_tokens"
            )
        return make_job(fields, prompt, "messages", sampling), Options.of(fields, sampling)

    def answer(self, generation: Generation, options: Options) -> "ChatAnswer":
        return ChatAnswer(AnswerBase(generation, options, "chatcmpl", self._model))


class ChatAnswer:
    """A conversation's next turn, in one sample or several."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer("chat.completion.chunk")
        samples = range(base.generation.num_samples)
        self._live = len(samples)
        self._texts = [""] * len(samples)
        self._token_ids: list[list[int]] = [[] for _ in samples]
        self._logprobs: list[list[dict[str, object]]] = [[] for _ in samples]
        self._tells_all = base.tells_all
        self._text_events = [self._writer.text_event(index, b'"delta":{"content":', b"}") for index in samples]

    def first_events(self) -> bytes:
        extra = b""
        if self._base.options.return_token_ids:
            extra = b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompts[0]))
        events = b""
        for index in range(len(self._texts)):
            role = sse.choice(index, b'"delta":{"role":"assistant","content":""}')
            events += self._writer.event(role, extra, self._base.usage_of(index))
        return events

    def events(self, delta: Delta) -> bytes:
        index = delta.index
        if delta.finished is None and not self._tells_all:
            return self._text_events[index](delta.text) if delta.text else b""
        events = b""
        if delta.text or (self._tells_all and delta.token_ids):
            ids = sse.token_ids_member(delta.token_ids) if self._base.options.return_token_ids else b""
            content = b'"delta":{"content":%b}' % sse.encode_json(delta.text)
            told = sse.encode_json(_logprobs(self._content(delta))) if delta.logprobs else b"null"
            choice = sse.choice(index, content, extra=ids, logprobs=told)
            events = self._writer.event(choice, usage=self._base.usage_of(index))
        if delta.finished is not None:
            self._live -= 1
            finish = sse.encode_json(finish_reason(delta.finished))
            stop = b',"stop_reason":' + sse.encode_json(self._base.stop_reason(delta.finished))
            choice = sse.choice(index, b'"delta":{}', finish, stop)
            is_last = self._live == 0 and not self._base.options.include_usage
            timeline = members(self._base.timeline()) if is_last else b""
            events += self._writer.event(choice, timeline, self._base.usage_of(index))
        return events

    def last_events(self) -> bytes:
        if not self._base.options.include_usage:
            return b""
        return self._writer.event(b"", members(self._base.timeline()), self._base.usage)

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._token_ids[delta.index] += delta.token_ids
        if delta.logprobs:
            self._logprobs[delta.index] += self._content(delta)

    def body(self) -> bytes:
        choices = [self._choice(index) for index in range(len(self._texts))]
        response = self._base.head("chat.completion") | {"choices": choices} | self._base.prompt_logprobs(0)
        if self._base.options.return_token_ids:
            response["prompt_token_ids"] = list(self._base.generation.prompts[0])
        return sse.encode_json(response | self._base.tail())

    def _choice(self, index: int) -> dict[str, object]:
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": self._texts[index]},
            "logprobs": None if self._base.options.num_logprobs is None else _logprobs(self._logprobs[index]),
            "finish_reason": finish_reason(finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return choice

    def _content(self, delta: Delta) -> list[dict[str, object]]:
        return chat_content(self._base.positions(delta), as_ids=self._base.options.tokens_as_ids)


def _logprobs(content: list[dict[str, object]]) -> dict[str, object]:
    return {"content": content, "refusal": None}


def members(values: dict[str, object]) -> bytes:
    """Further members of a JSON object, with their leading comma."""
    return b"," + sse.encode_json(values)[1:-1] if values else b""


def _sampling(body: Body, fields: ChatFields) -> types_pb2.SamplingParams:
    """``max_completion_tokens`` is the newer name of ``max_tokens`` and wins; ``logprobs`` asks for the token's own,
    ``top_logprobs`` for alternatives."""
    own: dict[str, object] = {}
    names = {"logprobs": "top_logprobs"}
    if fields.max_completion_tokens is not None:
        own["max_tokens"] = fields.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if fields.logprobs:
        own["logprobs"] = 0 if fields.top_logprobs is None else fields.top_logprobs
    elif fields.top_logprobs is not None and fields.top_logprobs != 0:
        raise errors.InvalidArgument("top_logprobs needs logprobs to be true", "top_logprobs")
    try:
        return sampling_params(body, **own)
    except errors.InvalidArgument as error:
        error.field = names.get(error.field or "", error.field)
        raise
