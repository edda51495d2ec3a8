"""``/v1/chat/completions``: reads bodies and shapes answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.request import errors
from tokenloom.v1 import output_processor_pb2, types_pb2

from ..assistant.message_plans import CallDelta, MessagePlans, OutputReader, calls_of, reasoning_of, text_of
from ..encoding import sse
from ..encoding.sse import JsonBlocks
from ..formats.tool_request import NO_TOOLS, read_tool_request
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openapi.request_schemas import ChatCompletionRequest
from ..records.generate_request import GenerateRequest
from ..tenants.tenant import Tenant
from .answer import MANY_PARTS, VALUES_PER_STEP, AnswerBase, choice_blocks, finish_reason, routed_member
from .body_reader import AnswerOptions, Body, BodyReader, ignored_in_chat, make_generate_request, sampling_params
from .chat_messages import read_chat, template_kwargs
from .event_ids import CONTENT_ENDED, FINISHED
from .openai_logprobs import chat_entry


@dataclass(frozen=True, slots=True)
class ChatApi:
    """Reads bodies of the endpoint and makes its answers."""

    reader: BodyReader
    plans: MessagePlans
    is_resumable = True

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
        generate_request = make_generate_request(fields, chat, "messages", sampling, tenant)
        shows = fields.include_reasoning is not False and not (fields.reasoning or {}).get("exclude")
        plan, unbound = self.plans.apply(request, generate_request, include_reasoning=shows)
        ignored = (*self.reader.ignored(body, ChatCompletionRequest), *ignored_in_chat(body), *lost, *unbound)
        if request.tools and "structured_outputs" not in names and body.get("structured_outputs") is None:
            names["structured_outputs"] = "tools"  # constrained, if at all, to calls that are forced or strict
        return generate_request, AnswerOptions.of(fields, sampling, plan=plan, ignored=ignored, field_names=names)

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> "ChatAnswer":
        return ChatAnswer(AnswerBase(generation, options, "chatcmpl", generation.model, "chat.completion.chunk"))


class ChatAnswer:
    """Shapes a conversation's next turn, in one sample or several."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer
        self._live = base.generation.num_samples
        self._has_details = base.has_details or base.options.plan is not None
        # The token that ends an output is not part of its text, so it has no entry, as in OpenAI's API.
        self._ends: Sequence[int] = () if base.options.shows_stop else base.generation.stop_token_ids
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
            if self._base.has_begun(index):
                continue
            role = sse.choice(index, b'"delta":{"role":"assistant","content":""}')
            events += self._line(index) + self._writer.event(role, extra, self._base.usage_of(index))
        return events

    def _line(self, index: int, state: str = "") -> bytes:
        """Return the line of an event's id; empty if the client did not ask for ids."""
        return b"" if self._base.ids is None else self._base.ids.line(index, state)

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""
        turn = self._turns[delta.index]
        if (ids := self._base.ids) is not None:
            ids.advance(delta)
        if delta.finished is None and not self._has_details:
            if not delta.text:
                return b""
            event = b"%b%b%b" % (turn.head, sse.encode_json(delta.text), turn.tail)
            return event if ids is None else ids.line(delta.index) + event
        events = self._content_event(delta, turn)
        if delta.finished is not None:
            if self._base.has_content(delta.index):
                events = b""
            self._live -= 1
            events += self._last_event(delta.index, delta.finished)
        return events

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""
        self.events(delta)
        self._base.repeated(delta.index)

    def last_events(self) -> bytes:
        """Return the events after all output."""
        return self._base.last_events() + sse.DONE

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""
        return len(delta.logprobs) > MANY_PARTS

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""
        turn, as_ids = self._turns[delta.index], self._base.options.tokens_as_ids
        num_values = 0
        for at in self._base.positions(delta):
            if at.token_id in self._ends:
                continue
            turn.logprobs.add(chat_entry(at, as_ids=as_ids))
            num_values += 1 + len(at.ids)
            if num_values >= VALUES_PER_STEP:
                yield num_values
                num_values = 0
        yield num_values

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""
        turn = self._turns[delta.index]
        turn.feed(delta.text, ends=delta.finished is not None)
        turn.token_ids += delta.token_ids
        return self.shape(delta) if delta.logprobs else None

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""
        if not self._base.is_plain:
            choices = (self._blocks(index, turn) for index, turn in enumerate(self._turns))
            return self._base.body("chat.completion", choices, self._own_blocks())
        plain = [self._choice(index, turn) for index, turn in enumerate(self._turns)]
        return iter((self._base.plain_body("chat.completion", plain, self._own_members()),))

    def _own_members(self) -> dict[str, object]:
        if not self._base.options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._base.generation.prompts[0])}

    def _own_blocks(self) -> Iterator[bytes]:
        yield from self._base.prompt_logprobs(0)
        yield sse.members(self._own_members())

    def _blocks(self, index: int, turn: "_Turn") -> Iterator[bytes]:
        yield from choice_blocks(self._choice(index, turn), _logprobs(turn.logprobs))
        yield b"}"

    def _content_event(self, delta: Delta, turn: "_Turn") -> bytes:
        """Return the event of a delta's content; empty when it has none to send."""
        added = turn.feed(delta.text, ends=delta.finished is not None)
        if not (any(added.values()) or (self._base.has_details and delta.token_ids)):
            return b""
        ids = sse.token_ids_member(delta.token_ids) if self._base.options.return_token_ids else b""
        logprobs = b"".join(_logprobs(self._content(delta, turn))) if delta.logprobs else b"null"
        choice = sse.choice(delta.index, b'"delta":%b' % sse.encode_json(added), extra=ids, logprobs=logprobs)
        line = self._line(delta.index, "" if delta.finished is None else CONTENT_ENDED)
        return line + self._writer.event(choice, usage=self._base.usage_of(delta.index))

    def _last_event(self, index: int, finished: output_processor_pb2.RequestFinished) -> bytes:
        """Return the event that ends an output."""
        finish = sse.encode_json(self._finish_reason(index, finished))
        stop = b',"stop_reason":' + sse.encode_json(self._base.stop_reason(finished))
        stop += sse.members(routed_member(finished))
        choice = sse.choice(index, b'"delta":{}', finish, stop)
        is_last = self._live == 0 and not self._base.options.include_usage
        timeline = sse.members(self._base.timeline()) if is_last else b""
        return self._line(index, FINISHED) + self._writer.event(choice, timeline, self._base.usage_of(index))

    def _choice(self, index: int, turn: "_Turn") -> dict[str, object]:
        """Return a choice; its log probabilities are only marked."""
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "message": turn.message(),
            "logprobs": self._base.options.num_logprobs,
            "finish_reason": self._finish_reason(index, finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = turn.token_ids
        return choice | routed_member(finished)

    def _finish_reason(self, index: int, finished: output_processor_pb2.RequestFinished) -> str:
        """Return ``tool_calls`` for an output that ended by itself and calls tools; one that the client's stop string
        cut within a call does not."""
        reason, turn = finish_reason(finished), self._turns[index]
        if reason != "stop" or not turn.calls or (finished.stop_reason and turn.is_within_call):
            return reason
        return "tool_calls"

    def _content(self, delta: Delta, turn: "_Turn") -> JsonBlocks:
        """Return a delta's log probabilities, which may be shaped already."""
        if not turn.logprobs:
            for _ in self.shape(delta):
                pass
        return turn.logprobs


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
        self.logprobs = JsonBlocks()
        self.calls: list[dict[str, Any]] = []
        is_open, may_reason = generation.opens_reasoning, generation.may_reason
        self._reader = OutputReader(plan, reasoning_is_open=is_open, may_reason=may_reason)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        """Return what more text adds, as a ``delta``; without values while nothing is certain.

        ``ends``: it is the last text.
        """
        if self._reader.is_plain:
            self._content.append(text)
            return {"content": text}
        delta = self._reader.feed(text, ends=ends)
        if not delta:
            return {}
        added: dict[str, object] = {}
        if content := text_of(delta):
            self._content.append(content)
            added["content"] = content
        if reasoning := reasoning_of(delta):
            self._reasoning.append(reasoning)
            added |= _reasoning(reasoning)
        if calls := calls_of(delta):
            added["tool_calls"] = [self._add_call(call) for call in calls]
        return added

    @property
    def is_within_call(self) -> bool:
        """Return whether the output ends within a call."""
        return self._reader.is_within_call

    def message(self) -> dict[str, object]:
        """Return all of it, as a ``message``."""
        content = None if self.calls and not self._content else "".join(self._content)
        message = {"role": "assistant", "content": content} | _reasoning("".join(self._reasoning))
        for call, arguments in zip(self.calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        return message | {"tool_calls": self.calls} if self.calls else message

    def _add_call(self, call: CallDelta) -> dict[str, object]:
        """Return a call's delta; only the first one holds its id and name."""
        if not call.call_id:
            self._arguments[call.index].append(call.arguments)
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": call.call_id, "type": "function", "function": function}
        self.calls.append(whole)
        self._arguments.append([call.arguments])
        return {"index": call.index, **whole, "function": dict(function)}


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


def _reasoning(text: str) -> dict[str, object]:
    """Return reasoning under vLLM's name, and the older name that clients know."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _logprobs(content: JsonBlocks) -> Iterator[bytes]:
    yield b'{"content":['
    yield from content.take()
    yield b'],"refusal":null}'
