"""``/v1/chat/completions``: reading bodies."""

from typing import Any

from tokenloom.request import errors
from tokenloom.v1 import types_pb2

from ..assistant.message_plans import MessagePlans
from ..generation.generation import Generation
from ..generation.job import Chat, Job
from ..http import sse
from ..tools.tool_request import ToolRequest, read_tool_request, tools_json
from .answer import AnswerBase
from .chat_answer import ChatAnswer
from .chat_messages import read_messages
from .openai_models import Body, BodyReader, CommonFields, Options, make_job, sampling_params


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """A chat body, but for the sampling parameters."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class ChatApi:
    """The endpoint, for one served model."""

    def __init__(self, reader: BodyReader, model: str, plans: MessagePlans) -> None:
        self._reader = reader
        self._model = model
        self._plans = plans

    def read(self, body: Body) -> tuple[Job, Options]:
        fields = self._reader.read(body, ChatFields)
        if fields.add_special_tokens:
            raise errors.InvalidArgument(
                "add_special_tokens is not supported for chats: the template has its own", "add_special_tokens"
            )
        request = read_tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        sampling = _sampling(body, fields)
        job = make_job(fields, _prompt(fields, request), "messages", sampling)
        plan = self._plans.apply(request, job, include_reasoning=fields.include_reasoning is not False)
        return job, Options.of(fields, sampling, plan=plan)

    def answer(self, generation: Generation, options: Options) -> ChatAnswer:
        return ChatAnswer(AnswerBase(generation, options, "chatcmpl", self._model))


def _prompt(fields: ChatFields, request: ToolRequest) -> Chat:
    return Chat(
        messages_json=read_messages(fields.messages, "messages"),
        tools_json=tools_json(request.tools),
        template_kwargs_json=sse.encode_json(fields.chat_template_kwargs) if fields.chat_template_kwargs else b"",
        add_generation_prompt=fields.add_generation_prompt is not False,
    )


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
    elif fields.top_logprobs is not None and (fields.top_logprobs != 0 or fields.top_logprobs is False):
        raise errors.InvalidArgument("top_logprobs needs logprobs to be true", "top_logprobs")
    try:
        return sampling_params(body, **own)
    except errors.InvalidArgument as error:
        error.field = names.get(error.field or "", error.field)
        raise
