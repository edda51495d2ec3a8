"""``/render`` and ``/derender`` of chats and completions: what a request becomes before an engine, and an answer after
it, with the names of vLLM's endpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tokenloom.request import errors, packed_ids
from tokenloom.request.narrowing import ALL_LOGPROBS
from tokenloom.request.sampling_params import SamplingFields
from tokenloom.v1 import output_processor_pb2, types_pb2

from ..encoding.sse import encode_json, members
from ..endpoints.generation_endpoint import GenerationEndpoint
from ..generation.preparation import Prepared
from ..http.http_exchange import IGNORED_HEADER, HttpExchange, listed, respond_in_pieces
from ..http.request_body import BodyParser
from ..http.route import Routes
from ..mesh.text_client import TextClient
from ..mesh.tokenizer_client import limited
from ..openai.body_reader import AnswerOptions, Body
from ..openai.chat import ChatApi
from ..openai.derender import Derenderer
from ..openai.derender_body import Derendering, DerenderReader
from ..openapi import route_table
from ..records.generate_request import Chat, GenerateRequest
from ..serving.served_mesh import ServedMesh
from ..tenants.tenant import Tenant

_IDS_PER_BLOCK = 1 << 11
_DEFAULTS: Mapping[str, Any] = {name: getattr(SamplingFields(), name) for name in SamplingFields.__struct_fields__}
_RULED = frozenset({"max_tokens", "seed", "stop_token_ids"})
"""Parameters that are written by rules of their own."""


@dataclass(frozen=True, slots=True)
class RenderEndpoint:
    """Returns the requests that a body becomes: the prompts' token ids, and sampling parameters in full."""

    endpoint: GenerationEndpoint
    """Of the plain request, which reads the body."""
    mesh: ServedMesh
    prefix: str
    """Of the requests' ids."""
    timeout: float
    """Seconds that a call may take."""

    async def __call__(self, exchange: HttpExchange) -> None:
        request, options, _ = await self.endpoint.read(exchange)
        _check(request)
        async with limited(min(request.timeout or self.timeout, self.timeout)):
            prepared = await self.mesh.generator.render(request)
        headers = [(IGNORED_HEADER, listed(options.ignored))] if options.ignored else []
        await respond_in_pieces(exchange, self._blocks(request, options, prepared), headers)

    def _blocks(self, request: GenerateRequest, options: AnswerOptions, prepared: Prepared) -> Iterator[bytes]:
        """Yield the JSON: an object for a chat, a list with one for each prompt of a completion."""
        is_chat = isinstance(request.prompts, Chat)
        base = f"{self.prefix}-{self.mesh.generator.draw_id()}"
        yield b"" if is_chat else b"["
        for number, submit in enumerate(prepared.submits):
            yield b"," * bool(number)
            name = base if len(prepared.submits) == 1 else f"{base}-{number}"
            yield b'{"request_id":%b,"token_ids":[' % encode_json(name)
            ids = submit.prompt.token_ids or packed_ids.ids_of(submit.prompt)
            for start in range(0, len(ids), _IDS_PER_BLOCK):
                yield b"," * bool(start) + encode_json(list(ids[start : start + _IDS_PER_BLOCK]))[1:-1]
            yield b"]%b}" % members(self._members(request, options, submit, prepared))
        yield b"" if is_chat else b"]"

    def _members(
        self, request: GenerateRequest, options: AnswerOptions, submit: output_processor_pb2.Submit, prepared: Prepared
    ) -> dict[str, object]:
        stream = None
        if options.stream:
            stream = {"include_usage": options.include_usage, "continuous_usage_stats": options.continuous_usage}
        return {
            "sampling_params": self._sampling(request, submit),
            "model": self.mesh.model if request.adapter is None else request.adapter.name,
            "output_mode": "tokens",
            "stream": options.stream,
            "stream_options": stream,
            "return_token_ids": options.return_token_ids or None,
            "cache_salt": request.own_salt or None,
            "priority": request.priority,
            "reasoning_ended": _reasoning_ended(submit, prepared),
            **_media_members(request, submit),
            **dict.fromkeys(("reasoning_parser_kwargs", "token_offsets", "content_parts")),
            **dict.fromkeys(("kv_transfer_params", "ec_transfer_params")),
        }

    def _sampling(self, request: GenerateRequest, submit: output_processor_pb2.Submit) -> dict[str, object]:
        """Return what differs from vLLM's defaults: the client's values over those of the checkpoint."""
        params, text = submit.sampling_params, request.text
        values = {name: value for name, value in sampling_values(params).items() if name not in _RULED}
        values |= {"max_tokens": params.max_tokens, "n": request.num_samples}
        if request.sampling.HasField("seed"):
            values["seed"] = request.sampling.seed
        words = list(request.bad_words)
        tools = self.mesh.plans.tools
        if request.sampling.bad_words and tools is not None:  # the beginnings of calls that the request forbids
            words += tools.openings
        lists: dict[str, Sequence[Any]] = {
            "stop": text.stop,
            "stop_token_ids": request.sampling.stop_token_ids,
            "bad_words": words,
        }
        values |= {name: list(value) for name, value in lists.items() if value}
        values |= {"ignore_eos": True} if request.ignore_eos else {}
        values |= {"include_stop_str_in_output": True} if text.include_stop_str_in_output else {}
        values |= {"stream_interval": text.stream_interval} if text.stream_interval else {}
        for name in ("skip_special_tokens", "spaces_between_special_tokens", "detokenize"):
            if text.HasField(name) and not getattr(text, name):
                values[name] = False
        return values


def _check(request: GenerateRequest) -> None:
    """Raise ``InvalidArgument`` for what has no form in token ids."""
    if request.beam_search is not None:
        raise errors.InvalidArgument("use_beam_search is not rendered: an engine samples", "use_beam_search")
    if request.echo:
        raise errors.InvalidArgument("echo is not rendered: the answer in tokens has no prompt", "echo")
    field = request.prompt_field
    if not isinstance(request.prompts, Chat) and not all(isinstance(prompt, str | list) for prompt in request.prompts):
        raise errors.InvalidArgument(f"{field} has no token ids to render", field)


def _media_members(request: GenerateRequest, submit: output_processor_pb2.Submit) -> dict[str, object]:
    """Return the member that names the images and sounds of a prompt by their files, and says where they stand."""
    items = submit.prompt.media
    if not items:
        return {"features": None}
    from ..records.media import MODALITIES, OPTIONS_FIELD, place_of  # here: most requests have none

    hashes: dict[str, list[str]] = {}
    places: dict[str, list[dict[str, int]]] = {}
    for item in items:
        modality, (offset, length) = MODALITIES[item.kind], place_of(item)
        hashes.setdefault(modality, []).append(item.digest.hex())
        places.setdefault(modality, []).append({"offset": offset, "length": length})
    features = {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": None, "mm_metadata": None}
    assert isinstance(request.prompts, Chat)
    options = request.prompts.media_options
    return {"features": features} | ({OPTIONS_FIELD: msgspec.json.decode(options)} if options else {})


def _reasoning_ended(submit: output_processor_pb2.Submit, prepared: Prepared) -> bool | None:
    """Return whether the prompt has closed the reasoning, or opened it; None: its tokens say so."""
    start = submit.prompt.reasoning_start
    if prepared.is_constrained_throughout or start == types_pb2.REASONING_START_CLOSED:
        return True
    return False if start == types_pb2.REASONING_START_OPEN else None


def sampling_values(params: types_pb2.SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not at their defaults, as a JSON body has them."""
    values: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = _value(params, name)
        if value is not None and value != default:
            values[name] = value
    if params.HasField("structured_outputs"):
        values["structured_outputs"] = _constraint(params.structured_outputs)
    return values


def _value(params: types_pb2.SamplingParams, name: str) -> Any:
    value = getattr(params, name)
    if name == "logit_bias":
        return {str(token_id): _rounded(bias) for token_id, bias in sorted(value.items())} or None
    if name == "repetition_detection":
        sizes = ("max_pattern_size", "min_pattern_size", "min_count")
        return {size: getattr(value, size) for size in sizes} if params.HasField(name) else None
    if isinstance(value, bool | int | float):
        descriptor = params.DESCRIPTOR.fields_by_name[name]
        if descriptor.has_presence and not params.HasField(name):
            return None
        if name in ("logprobs", "prompt_logprobs") and value == ALL_LOGPROBS:
            return -1
        return _rounded(value) if isinstance(value, float) else value
    return list(value) or None


def _rounded(value: float) -> float:
    """Return the shortest number that the wire's float32 stands for."""
    return float(f"{value:.7g}")


def _constraint(constraint: types_pb2.StructuredOutputs) -> dict[str, Any]:
    kind = constraint.WhichOneof("constraint")
    assert kind is not None
    value = getattr(constraint, kind)
    wanted: dict[str, Any] = {kind: list(value.texts) if kind == "choice" else value}
    if constraint.HasField("whitespace_pattern"):
        wanted["whitespace_pattern"] = constraint.whitespace_pattern
    if constraint.disable_any_whitespace:
        wanted["disable_any_whitespace"] = True
    return wanted


@dataclass(frozen=True, slots=True)
class DerenderRoutes:
    """Turns answers in tokens into those of the plain endpoints."""

    parser: BodyParser
    reads: DerenderReader
    derenderer: Derenderer
    mesh: ServedMesh
    max_body_bytes: int
    timeout: float
    """Seconds that a call may take."""

    async def chat(self, exchange: HttpExchange) -> None:
        await self._answer(exchange, self.reads.chat)

    async def completion(self, exchange: HttpExchange) -> None:
        await self._answer(exchange, self.reads.completion)

    async def _answer(self, exchange: HttpExchange, read: Callable[[Body, Tenant], Derendering]) -> None:
        def asked_for(body: Body) -> Derendering:
            name = body.get("model")
            adapter = None if name in self.mesh.names else self.mesh.models.find(name)
            asked = read(body, exchange.tenant)
            return asked if adapter is None else replace(asked, request=replace(asked.request, adapter=adapter))

        with await exchange.read_body(self.max_body_bytes) as received:
            asked = await self.parser.read(received.data, asked_for)
        async with limited(self.timeout):
            answer = await (self.derenderer.chunk(asked) if asked.streams else self.derenderer.whole(asked))
        ignored = asked.options.ignored
        await exchange.respond(200, answer, headers=[(IGNORED_HEADER, listed(ignored))] if ignored else [])


def render_routes(
    mesh: ServedMesh,
    endpoints: Sequence[GenerationEndpoint],
    chats: ChatApi,
    timeout: float,
) -> Routes:
    """Return the routes of one model. ``endpoints``: of chats, of completions and of tokens; ``timeout``: seconds."""
    texts = TextClient(mesh.outputs.stubs)
    derenderer = Derenderer(mesh.generator, mesh.tokenizers, texts, mesh.model)
    of_chats, of_completions, of_tokens = endpoints
    reads = DerenderReader(chats.reader, chats)
    back = DerenderRoutes(of_chats.parser, reads, derenderer, mesh, of_chats.max_body_bytes, timeout)
    return {
        route_table.GENERATE_TOKENS: of_tokens,
        route_table.RENDER_CHAT: RenderEndpoint(of_chats, mesh, "chatcmpl", timeout),
        route_table.RENDER_COMPLETIONS: RenderEndpoint(of_completions, mesh, "cmpl", timeout),
        route_table.DERENDER_CHAT: back.chat,
        route_table.DERENDER_COMPLETIONS: back.completion,
    }
