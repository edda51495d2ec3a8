"""``/v1/chat/completions``: reads bodies and shapes answers."""

from dataclasses import dataclass
from typing import Any

from tokenloom.request import errors
from tokenloom.v1 import output_processor_pb2, types_pb2

from ..assistant.message_plans import MessagePlans
from ..assistant.parsed_message import CallDelta, MessageDelta, ParsedMessage
from ..generation.generation import Generation
from ..generation.job import Job
from ..http import sse
from ..mesh.collector import Delta
from ..openapi.request_schemas import ChatCompletionRequest
from ..tenants.tenant import Tenant
from ..tools.tool_request import NO_TOOLS, read_tool_request
from .answer import AnswerBase, finish_reason
from .chat_messages import read_chat
from .openai_logprobs import chat_content
from .openai_models import Body, BodyReader, Options, make_job, sampling_params


@dataclass(frozen=True, slots=True)
class ChatApi:
    """Reads bodies of the endpoint and makes its answers."""

    reader: BodyReader
    model: str
    plans: MessagePlans

    def read(self, body: Body, tenant: Tenant) -> tuple[Job, Options]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, ChatCompletionRequest)
        if fields.add_special_tokens:
            raise errors.InvalidArgument(
                "add_special_tokens is not supported for chats: the template adds its own", "add_special_tokens"
            )
        request = NO_TOOLS
        if fields.tools is not None or fields.tool_choice is not None:
            request = read_tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        sampling = _sampling(body, fields)
        chat = read_chat(fields.messages, request.tools, fields.chat_template_kwargs, fields.add_generation_prompt)
        job = make_job(fields, chat, "messages", sampling, tenant)
        plan = self.plans.apply(request, job, include_reasoning=fields.include_reasoning is not False)
        return job, Options.of(fields, sampling, plan=plan)

    def answer(self, generation: Generation, options: Options) -> "ChatAnswer":
        return ChatAnswer(AnswerBase(generation, options, "chatcmpl", self.model, "chat.completion.chunk"))


class ChatAnswer:
    """Shapes a conversation's next turn, in one sample or several."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer
        self._live = base.generation.num_samples
        self._has_details = base.has_details or base.options.plan is not None
        self._turns: list[_Turn] = []
        for index in range(self._live):
            self._turns.append(_Turn(base, index))

    def first_events(self) -> bytes:
        """Return the events before any output."""
        extra = b""
        if self._base.options.return_token_ids:
            extra = b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompts[0]))
        events = b""
        for index in range(len(self._turns)):
            role = sse.choice(index, b'"delta":{"role":"assistant","content":""}')
            events += self._writer.event(role, extra, self._base.usage_of(index))
        return events

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""
        turn = self._turns[delta.index]
        if delta.finished is None and not self._has_details:
            return b"%b%b%b" % (turn.head, sse.encode_json(delta.text), turn.tail) if delta.text else b""
        events = self._content_event(delta, turn)
        if delta.finished is not None:
            self._live -= 1
            events += self._last_event(delta.index, delta.finished)
        return events

    def last_events(self) -> bytes:
        """Return the events after all output, without ``[DONE]``."""
        return self._base.last_events()

    def add(self, delta: Delta) -> None:
        """Keep some output for :meth:`body`."""
        turn = self._turns[delta.index]
        turn.feed(delta.text, ends=delta.finished is not None)
        turn.token_ids += delta.token_ids
        if delta.logprobs:
            turn.logprobs += self._content(delta)

    def body(self) -> bytes:
        """Return the whole JSON response."""
        choices = [self._choice(index, turn) for index, turn in enumerate(self._turns)]
        response = self._base.head("chat.completion") | {"choices": choices} | self._base.prompt_logprobs(0)
        if self._base.options.return_token_ids:
            response["prompt_token_ids"] = list(self._base.generation.prompts[0])
        return sse.encode_json(response | self._base.tail())

    def _content_event(self, delta: Delta, turn: "_Turn") -> bytes:
        """Return the event of a delta's content; empty when it has none to send."""
        added = turn.feed(delta.text, ends=delta.finished is not None)
        if not (any(added.values()) or (self._base.has_details and delta.token_ids)):
            return b""
        ids = sse.token_ids_member(delta.token_ids) if self._base.options.return_token_ids else b""
        logprobs = sse.encode_json(_logprobs(self._content(delta))) if delta.logprobs else b"null"
        choice = sse.choice(delta.index, b'"delta":%b' % sse.encode_json(added), extra=ids, logprobs=logprobs)
        return self._writer.event(choice, usage=self._base.usage_of(delta.index))

    def _last_event(self, index: int, finished: output_processor_pb2.RequestFinished) -> bytes:
        """Return the event that ends an output."""
        finish = sse.encode_json(self._finish_reason(index, finished))
        stop = b',"stop_reason":' + sse.encode_json(self._base.stop_reason(finished))
        choice = sse.choice(index, b'"delta":{}', finish, stop)
        is_last = self._live == 0 and not self._base.options.include_usage
        timeline = sse.members(self._base.timeline()) if is_last else b""
        return self._writer.event(choice, timeline, self._base.usage_of(index))

    def _choice(self, index: int, turn: "_Turn") -> dict[str, object]:
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "message": turn.message(),
            "logprobs": None if self._base.options.num_logprobs is None else _logprobs(turn.logprobs),
            "finish_reason": self._finish_reason(index, finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = turn.token_ids
        return choice

    def _finish_reason(self, index: int, finished: output_processor_pb2.RequestFinished) -> str:
        """Return ``tool_calls`` for an output that ended by itself and calls tools."""
        reason = finish_reason(finished)
        return "tool_calls" if reason == "stop" and self._turns[index].calls else reason

    def _content(self, delta: Delta) -> list[dict[str, object]]:
        return chat_content(self._base.positions(delta), as_ids=self._base.options.tokens_as_ids)


class _Turn:
    """Collects one output of a chat: the assistant's message, and what else the client asked for.

    Attributes:
        head, tail: What stands before and after the text in events that hold only text.
    """

    def __init__(self, base: AnswerBase, index: int) -> None:
        plan = base.options.plan
        generation = base.generation
        self.head, self.tail = base.writer.text_ends(index, b'"delta":{"content":', b"}")
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, object]] = []
        self.calls: list[dict[str, Any]] = []
        self._parser = None
        if plan is not None:
            is_open, may_reason = generation.opens_reasoning, generation.may_reason
            self._parser = ParsedMessage(plan, reasoning_is_open=is_open, may_reason=may_reason)
        self._content = ""
        self._reasoning = ""

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        """Return what more text adds, as a ``delta``; without values while nothing is certain.

        ``ends``: it is the last text.
        """
        delta = MessageDelta(text) if self._parser is None else self._parser.feed(text, ends=ends)
        self._content += delta.content
        self._reasoning += delta.reasoning
        added: dict[str, object] = {"content": delta.content} if delta.content or self._parser is None else {}
        added |= _reasoning(delta.reasoning)
        if delta.calls:
            added["tool_calls"] = [self._add_call(call) for call in delta.calls]
        return added

    def message(self) -> dict[str, object]:
        """Return all of it, as a ``message``."""
        content = None if self.calls and not self._content else self._content
        message = {"role": "assistant", "content": content} | _reasoning(self._reasoning)
        return message | {"tool_calls": self.calls} if self.calls else message

    def _add_call(self, call: CallDelta) -> dict[str, object]:
        """Return a call's delta; only the first one holds its id and name."""
        if not call.call_id:
            self.calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": call.call_id, "type": "function", "function": function}
        self.calls.append(whole)
        return {"index": call.index, **whole, "function": dict(function)}


def _sampling(body: Body, fields: ChatCompletionRequest) -> types_pb2.SamplingParams:
    """Return the sampling parameters. ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins;
    ``logprobs`` asks for the token's own, ``top_logprobs`` for alternatives."""
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


def _reasoning(text: str) -> dict[str, object]:
    """Return reasoning under vLLM's name, and the older name that clients know."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _logprobs(content: list[dict[str, object]]) -> dict[str, object]:
    return {"content": content, "refusal": None}
