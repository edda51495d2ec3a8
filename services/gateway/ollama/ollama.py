"""Ollama's API: translates its bodies into those of chats, completions and embeddings, shapes answers, and serves its
endpoints."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from tokenloom.request import errors
from tokenloom.request.errors import ContextLengthExceeded, InvalidArgument, TokenloomError
from tokenloom.request.narrowing import narrow_int
from tokenloom.request.tool_format import ToolFormat
from tokenloom.v1 import types_pb2

from ..assistant.message_plans import CallDelta, MessagePlans, OutputReader, calls_of, reasoning_of, text_of
from ..encoding.sse import encode_json, members
from ..endpoints.generation_endpoint import GenerationEndpoint
from ..formats.call_arguments import read_arguments
from ..formats.call_parser import numbered_call_id
from ..generation.running_generation import RunningGeneration
from ..generation.running_pooling import RunningPooling
from ..http.http_exchange import ErrorForm, HttpExchange
from ..http.request_body import BodyParser
from ..mesh.collector import Delta
from ..openai.answer import finish_reason, origin_members
from ..openai.body_reader import AnswerOptions, Body, BodyReader, inherited, renamed_twice
from ..openai.chat import ChatApi
from ..openai.completions import CompletionsApi
from ..openai.event_ids import IdKind
from ..openapi.ollama_schemas import OllamaEmbedRequest, OllamaRequest
from ..openapi.pooling_schemas import PoolingFields
from ..openapi.request_schemas import CommonFields
from ..pooling.pooling_api import Shape, ignored_fields, make_generate_request, split_inputs, version_members
from ..pooling.vector_json import result_blocks
from ..records.generate_request import GenerateRequest
from ..records.pooling_input import PoolingInput, check_count
from ..serving.served_mesh import ServedMesh
from ..tenants.tenant import Tenant
from .ollama_models import show_model

_ANY_NUMBER = 2**32 - 1
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
OPTIONS = {name: name for name in _SAME} | {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Options that have an effect, and their names in chats."""
_FIELDS = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()} | {"response_format": "format"}
"""What the client calls the fields of a chat."""


@dataclass(frozen=True, slots=True)
class NothingAsked:
    """Stands for a request without a prompt, by which Ollama's clients load a model, or unload it.

    Attributes:
        reason: ``load`` or ``unload``. Neither has an effect: the engines stay.
    """

    reason: str


def sampling_body(fields: OllamaRequest) -> dict[str, Any]:
    """Return the options in the spelling of chats and completions, without the limit of tokens."""
    options = (fields.options or {}).items()
    return {OPTIONS[name]: value for name, value in options if name in OPTIONS and name != "num_predict"}


def most_tokens(fields: OllamaRequest) -> int:
    """Return the most tokens that the client accepts, which may exceed the room in the context. Raises
    ``InvalidArgument``."""
    asked = (fields.options or {}).get("num_predict")
    if asked is None or (isinstance(asked, int) and asked <= 0):  # no limit
        return _ANY_NUMBER
    return narrow_int("max_tokens", asked, 1, _ANY_NUMBER)


def chat_body(fields: OllamaRequest, *, is_chat: bool) -> dict[str, Any]:
    """Return the chat that a body asks for. Raises ``InvalidArgument`` naming the field."""
    chat = sampling_body(fields)
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    asked: Mapping[str, Any] = {"role": "user", "content": fields.prompt, "images": fields.images}
    turns = fields.messages or [] if is_chat else [*system, asked]
    messages = [_turn(f"messages[{index}].images" if is_chat else "images", turn) for index, turn in enumerate(turns)]
    chat |= {"messages": messages, "tools": fields.tools or None}
    chat |= {"stream": fields.stream is not False, "response_format": _format(fields.format)}
    switch = {"chat_template_kwargs": {"enable_thinking": fields.think}, "include_reasoning": fields.think}
    effort = {"reasoning_effort": fields.think} if isinstance(fields.think, str) else switch
    return chat if fields.think is None else chat | effort


def _turn(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    names = {"thinking": "reasoning_content", "tool_name": "name"}
    turn = {names.get(name, name): value for name, value in message.items() if name != "images"}
    if images := message.get("images"):
        turn["content"] = [*_images(where, images), {"type": "text", "text": message.get("content") or ""}]
    return turn


def _images(where: str, images: object) -> list[dict[str, str]]:
    """Return the images of a turn, which stand before its text, as in Ollama."""
    from ..records.media import image_part, raw_url  # here: most conversations have none

    if not isinstance(images, list):
        raise InvalidArgument(f"{where} must be a list of images, each as base64", where)
    return [image_part(f"{where}[{at}]", raw_url(f"{where}[{at}]", image)) for at, image in enumerate(images)]


def number_calls(turns: Sequence[dict[str, Any]], form: ToolFormat | None) -> None:
    """Give ids to calls and results of tools, which have none in this API: chat templates may need them. A result is
    that of the first call of its tool that has none yet. ``form``: how the model writes calls."""
    number, open_calls = 0, list[tuple[object, str]]()
    for turn in turns:
        if isinstance(calls := turn.get("tool_calls"), list):
            turn["tool_calls"] = [*calls]
            for at, call in enumerate(calls):
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict):
                    continue  # refused by name where the chat is read
                name, own_id = str(function.get("name")), call.get("id")
                call_id = own_id if isinstance(own_id, str) and own_id else numbered_call_id(form, name, number)
                turn["tool_calls"][at] = call | {"id": call_id}
                open_calls.append((name, call_id))
                number += 1
        if turn.get("role") == "tool" and not turn.get("tool_call_id") and open_calls:
            place = next((at for at, (name, _) in enumerate(open_calls) if name == turn.get("name")), 0)
            turn["tool_call_id"] = open_calls.pop(place)[1]


def _format(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    if form not in (None, "", "json"):
        raise InvalidArgument('format must be "json" or a JSON schema', "format")
    return {"type": "json_object"} if form else None


_CUTS = {"truncate_prompt_tokens": "truncate"}


def error_body(error: TokenloomError) -> dict[str, object]:
    """Return the JSON body of an error."""
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        # Ollama's clients shorten a conversation where they read these words, which are Ollama's own.
        message = f"the input length exceeds the context length. {error.renamed(_CUTS).message}"
    return {"error": message}


OLLAMA = ErrorForm(error_body, is_lines=True)


@dataclass(frozen=True, slots=True)
class OllamaApi:
    """Reads bodies of an endpoint and makes its answers. A body becomes that of a chat, which is the same request."""

    chats: ChatApi
    completions: CompletionsApi
    """Reads prompts that are not rendered (``raw``)."""
    is_chat: bool
    event_ids = IdKind.NONE

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        reader = self.chats.reader
        fields = reader.read(body, OllamaRequest)
        if fields.raw and self.is_chat:
            raise InvalidArgument("raw is for /api/generate", "raw")
        names = _FIELDS if self.is_chat else _FIELDS | {"messages": "prompt"}
        try:
            request, options = self._generate_request(fields, tenant)
        except InvalidArgument as error:
            raise error.renamed(names) from None
        unread = (f"options.{name}" for name in fields.options or () if name not in OPTIONS)
        kept = ("keep_alive",) if fields.keep_alive is not None and options.request is None else ()
        ignored = (*reader.ignored(body, OllamaRequest), *kept, *unread, *inherited(options.ignored, _FIELDS))
        return request, replace(options, ignored=ignored, field_names=renamed_twice(options.field_names, names))

    def _generate_request(self, fields: OllamaRequest, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        # Read as a chat, so that limits, tools and reasoning are those of every other API.
        if not (fields.messages if self.is_chat else fields.prompt):
            nothing = NothingAsked("unload" if is_zero(fields.keep_alive) else "load")
            request = GenerateRequest((), "prompt", types_pb2.SamplingParams(), tenant=tenant)
            return request, AnswerOptions.of(CommonFields(), request.sampling, request=nothing)
        most = most_tokens(fields)
        if fields.raw:
            form = {"stream": fields.stream is not False, "response_format": _format(fields.format)}
            request, options = self.completions.read(sampling_body(fields) | form | {"prompt": fields.prompt}, tenant)
        else:
            chat = chat_body(fields, is_chat=self.is_chat)
            number_calls(chat["messages"], self.chats.plans.tools)
            request, options = self.chats.read(chat, tenant)
        return replace(request, most_tokens=most), options

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> "OllamaAnswer":
        return OllamaAnswer(generation, options, is_chat=self.is_chat)


def is_zero(keep_alive: object) -> bool:
    """Return whether a duration, a number or a text with units, is no time."""
    if isinstance(keep_alive, str):
        digits = [char for char in keep_alive if char.isdecimal()]
        return bool(digits) and set(digits) == {"0"}
    return keep_alive == 0 and not isinstance(keep_alive, bool)


class OllamaAnswer:
    """Shapes the assistant's next turn. Calls are sent at the end, when their arguments are complete."""

    def __init__(self, generation: RunningGeneration, options: AnswerOptions, *, is_chat: bool) -> None:
        self._generation, self._model, self._is_chat = generation, generation.model, is_chat
        is_open, may_reason = generation.opens_reasoning, generation.may_reason
        self._reader = OutputReader(options.plan, reasoning_is_open=is_open, may_reason=may_reason)
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallDelta] = []

    def first_events(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        """Return the line of some output; empty while nothing is certain."""
        content, thoughts = self._read(delta)
        return self._line(content, thoughts) if content or thoughts else b""

    def last_events(self) -> bytes:
        # Before the last line, whose message Ollama's own clients do not read.
        calls = self._line(calls=self._calls) if self._calls else b""
        return calls + self._line(ends=True)

    def keep_alive(self) -> bytes:
        return self._line()

    def repeat(self, delta: Delta) -> None:
        self._read(delta)

    def is_large(self, delta: Delta) -> bool:
        return False

    def shape(self, delta: Delta) -> Iterator[int]:
        return iter(())

    def add(self, delta: Delta) -> None:
        content, thoughts = self._read(delta)
        self._content.append(content)
        self._thoughts.append(thoughts)

    def body(self) -> Iterator[bytes]:
        yield self._line("".join(self._content), "".join(self._thoughts), self._calls, ends=True)

    def _read(self, delta: Delta) -> tuple[str, str]:
        """Keep the calls of some output, and return its text and its reasoning."""
        added = self._reader.feed(delta.text, ends=delta.finished is not None)
        for call in calls_of(added):
            if call.call_id:
                self._calls.append(call)
            else:
                self._calls[-1].arguments += call.arguments
        return text_of(added), reasoning_of(added)

    def _line(
        self, text: str = "", thoughts: str = "", calls: list[CallDelta] | None = None, ends: bool = False
    ) -> bytes:
        turn: dict[str, Any] = {"thinking": thoughts} if thoughts else {}
        turn["content" if self._is_chat else "response"] = text
        if calls:
            is_cut = finish_reason(self._generation.finished[0]) != "stop"  # which is a stop string's reason as well
            read = partial(read_arguments, is_cut=is_cut)
            functions = ({"name": call.name, "arguments": read(call.arguments)} for call in calls)
            turn["tool_calls"] = [{"function": function} for function in functions]
        line = line_of(self._model, turn, is_chat=self._is_chat, ends=ends)
        return encode_json(line | (self._ending() if ends else {})) + b"\n"

    def _ending(self) -> dict[str, object]:
        """Return why the answer ended, and the counts and nanoseconds of which clients make tokens per second."""
        generation = self._generation
        usage, times, total = generation.usage, generation.timeline, generation.total_ns
        before = times.tokenize_ns + times.placement_ns + times.queued_ns
        # All that follows the prompt, not the time between the arrivals of tokens: a short answer may arrive at once.
        # At least 1, because clients divide by it.
        rest = total - before - times.prefill_ns
        return {
            "done_reason": finish_reason(generation.finished[0]),
            "total_duration": total,
            "load_duration": before,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(times.prefill_ns, 1),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(rest, 1),
            **origin_members(generation.finished[0]),
        }


def line_of(model: str, turn: dict[str, Any], *, is_chat: bool, ends: bool) -> dict[str, Any]:
    """Return a part of an answer. ``turn``: members of the message, or of the line itself."""
    line: dict[str, Any] = {"model": model, "created_at": datetime.now(UTC).isoformat()}
    line |= {"message": {"role": "assistant", **turn}} if is_chat else turn
    return line | {"done": ends}


@dataclass(frozen=True, slots=True)
class OllamaEndpoint:
    """Answers in a conversation or to a prompt. A request without either loads or unloads the model in Ollama; here the
    engines stay."""

    endpoint: GenerationEndpoint
    api: OllamaApi

    async def __call__(self, exchange: HttpExchange) -> None:
        held = [await self.endpoint.read(exchange)]
        nothing = held[0][1].request
        if not isinstance(nothing, NothingAsked):
            await self.endpoint(exchange, held)
            return
        adapter = held[0][0].adapter
        name = self.endpoint.names.own[0] if adapter is None else adapter.name
        turn = {"content" if self.api.is_chat else "response": ""}
        line = line_of(name, turn, is_chat=self.api.is_chat, ends=True) | {"done_reason": nothing.reason}
        await exchange.respond(200, encode_json(line))


@dataclass(frozen=True, slots=True)
class OllamaModelCalls:
    """Answers calls that name a model in their body."""

    mesh: ServedMesh
    plans: MessagePlans
    parser: BodyParser
    max_body_bytes: int
    began: str
    """When the gateway started."""

    async def show(self, exchange: HttpExchange) -> None:
        """Describe a model. Raises ``ModelNotFound``."""
        await self._read(exchange)
        await exchange.respond(200, encode_json(show_model(self.mesh, self.plans, self.began)))

    async def pull(self, exchange: HttpExchange) -> None:
        """Report that a served model is there. Raises ``ModelNotFound`` for others: a mesh draws no models."""
        body = await self._read(exchange)
        done = encode_json({"status": "success"})
        if body.get("stream") is False:
            await exchange.respond(200, done)
        else:
            await exchange.respond(200, done + b"\n", b"application/x-ndjson")

    async def refuse(self, exchange: HttpExchange) -> None:
        """Raise ``Unimplemented``."""
        raise errors.Unimplemented("the models of a mesh are those that its operator has started; none can be changed")

    async def _read(self, exchange: HttpExchange) -> Body:
        with await exchange.read_body(self.max_body_bytes) as received:
            body = await self.parser.read(received.data, dict)
        # Older clients of Ollama send the model's name as `name`.
        self.mesh.models.find(body.get("model") or body.get("name"))
        return body


@dataclass(frozen=True, slots=True)
class OllamaEmbedApi:
    """Reads bodies of one of the two endpoints. ``is_older``: that of a single prompt."""

    reader: BodyReader
    is_older: bool

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        """Return what the body asks for, what shapes the answer, and the fields that have no effect. Raises
        :class:`errors.InvalidArgument` naming the field."""
        began = time.monotonic_ns()
        fields = self.reader.read(body, OllamaEmbedRequest)
        field = "prompt" if self.is_older else "input"
        inputs = split_inputs(getattr(fields, field), field)
        check_count(len(inputs), field)
        cut = PoolingFields(truncate_prompt_tokens=None if fields.truncate is False else -1)
        params = types_pb2.PoolingParams(
            task=types_pb2.POOLING_TASK_EMBED,
            dimensions=None if not fields.dimensions else narrow_int("dimensions", fields.dimensions, 1, 2**32 - 1),
        )
        pooling_input = PoolingInput(make_generate_request(cut, inputs, field, tenant), params, keep_first=True)
        shape = _single if self.is_older else lambda pooling: _all(pooling, began)
        return pooling_input, shape, ignored_fields(body, fields)


def _single(pooling: RunningPooling) -> Iterator[bytes]:
    yield b'{"embedding":'
    yield from result_blocks(pooling.results[0], as_base64=False)
    yield members(version_members(pooling)) + b"}"


def _all(pooling: RunningPooling, began_ns: int) -> Iterator[bytes]:
    yield encode_json({"model": pooling.model})[:-1] + b',"embeddings":['
    for index, result in enumerate(pooling.results):
        yield b"," if index else b""
        yield from result_blocks(result, as_base64=False)
    counts = {"prompt_eval_count": pooling.usage.prompt_tokens, "total_duration": time.monotonic_ns() - began_ns}
    yield b"]," + encode_json(counts | {"load_duration": 0} | version_members(pooling))[1:]
