"""``/inference/v1/generate``: takes token ids and gives token ids, with the names of vLLM's endpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_int, narrow_token_ids
from tokenloom.v1 import engine_pb2, output_processor_pb2, types_pb2

from ..encoding import sse
from ..encoding.sse import JsonBlocks
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openapi.token_schemas import PromptFeatures, TokenGenerationRequest, TokenSampling
from ..records.generate_request import Chat, GenerateRequest
from ..tenants.tenant import Tenant
from .answer import MANY_PARTS, VALUES_PER_STEP, AnswerBase, finish_reason, origin_members
from .body_reader import AnswerOptions, Body, BodyReader, make_generate_request, sampling_params
from .event_ids import FINISHED, IdKind
from .openai_logprobs import TokenPosition, chat_entry

if TYPE_CHECKING:
    from ..records.media import MediaPart

_WHY = "the mesh places prefill and decode itself, and its engines take KV and rows only from engines of its registry"
_OF_SOURCE = ("remote_engine_id", "remote_engine_epoch", "remote_lease_id", "remote_num_tokens", "first_token_id")
_WEIGHTS = "remote_weights"
"""The whole fingerprint of the weights that computed the KV, in hexadecimal digits."""
_HOLD, _READ = "do_remote_decode", "do_remote_prefill"
_FIELDS = {"hold_kv": "kv_transfer_params", "kv_source": "kv_transfer_params"}
_OF_VLLM = ("remote_request_id", "remote_block_ids", "remote_host", "remote_port", "tp_size")
"""Of the parameters of vLLM's NIXL connector: routers hand them on, and here the lease stands for them."""
_WITHOUT_EFFECT = ("output_kind", "flat_logprobs", "skip_clone")
"""What vLLM's parameters hold of its Python API."""
_SAMPLING = frozenset(
    {"stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"}
    | {"ignore_eos", "n", "stream_interval", "bad_words", "logprobs", *_WITHOUT_EFFECT}
)
_NO_SAMPLING = frozenset(TokenSampling.__struct_fields__) - _SAMPLING
"""What other endpoints have beside their sampling parameters."""
_START = {
    None: types_pb2.REASONING_START_UNSPECIFIED,
    True: types_pb2.REASONING_START_CLOSED,
    False: types_pb2.REASONING_START_OPEN,
}


@dataclass(frozen=True, slots=True)
class TokensApi:
    """Reads bodies of the endpoint and makes its answers."""

    reader: BodyReader
    event_ids = IdKind.POSITION

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, TokenGenerationRequest)
        if fields.ec_transfer_params is not None:
            raise errors.InvalidArgument(f"ec_transfer_params is not accepted here: {_WHY}", "ec_transfer_params")
        if not isinstance(fields.token_ids, list) or not fields.token_ids:
            raise errors.InvalidArgument("token_ids must be a list of token ids, at least one", "token_ids")
        own = {name: value for name, value in fields.sampling_params.items() if value is not None}
        inner = self._inner(fields, own)
        sampling, lost = sampling_params(own, logprobs=inner.logprobs)
        without = [name for name in own if name in _WITHOUT_EFFECT]
        unread = [f"sampling_params.{name}" for name in (*self.reader.ignored(own, TokenSampling), *without, *lost)]
        others = [name for name in ("reasoning_parser_kwargs", "token_offsets") if getattr(fields, name) is not None]
        ignored = (*self.reader.ignored(body, TokenGenerationRequest), *others, *unread)
        # Without the prompt, which must not live as long as the answer.
        kept = msgspec.structs.replace(fields, token_ids=(), sampling_params={}, content_parts=None)
        options = AnswerOptions.of(inner, sampling, ignored=ignored, request=kept, field_names=_FIELDS)
        shown = _shown(fields)
        request = make_generate_request(inner, shown or [fields.token_ids], "token_ids", sampling, tenant)
        if fields.output_mode == "text" and inner.detokenize is False:
            raise errors.InvalidArgument("output_mode text needs detokenize", "output_mode")
        if fields.output_mode == "tokens" and not request.text.stop:
            request.text.detokenize = False  # the text would not be read
        kv = None if fields.kv_transfer_params is None else _half(fields.kv_transfer_params, request)
        if kv is not None and kv.HasField("source") and kv.source.num_tokens != len(fields.token_ids):
            message = f"the KV covers {kv.source.num_tokens} tokens, and the prompt has {len(fields.token_ids)}"
            raise errors.InvalidArgument(f"kv_transfer_params: {message}", "kv_transfer_params")
        start = _START[fields.reasoning_ended]
        return replace(request, reasoning_start=start, kv=kv, fills_context=True), options

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> "TokensAnswer":
        return TokensAnswer(AnswerBase(generation, options, "generate-tokens", generation.model, ""))

    def _inner(self, fields: TokenGenerationRequest, own: dict[str, Any]) -> TokenSampling:
        """Return the fields that this endpoint has in ``sampling_params``, and others have beside them."""
        if wrong := sorted(own.keys() & _NO_SAMPLING):
            raise errors.InvalidArgument(f"sampling_params has no {wrong[0]}", f"sampling_params.{wrong[0]}")
        inner = self.reader.read(own, TokenSampling)
        return msgspec.structs.replace(
            inner,
            stream=fields.stream,
            stream_options=fields.stream_options,
            cache_salt=fields.cache_salt,
            priority=fields.priority,
            return_token_ids=fields.return_token_ids,
        )


def _half(given: dict[str, Any], request: GenerateRequest) -> output_processor_pb2.KVHandover:
    """Return which half of a request its parameters ask for. Raises ``InvalidArgument``."""
    where, values = "kv_transfer_params", {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(values.keys() - {_HOLD, _READ, _WEIGHTS, *_OF_SOURCE, *_OF_VLLM}):
        raise errors.InvalidArgument(f"{where}.{unknown[0][:64]} is unknown", where)
    holds, reads = (values.get(name, False) for name in (_HOLD, _READ))
    if {type(holds), type(reads)} != {bool} or holds is reads:
        raise errors.InvalidArgument(f"{where} must have one of {_HOLD} and {_READ} true", where)
    sampling = request.sampling
    if request.num_samples > 1 or request.beam_search is not None:
        raise errors.InvalidArgument(f"{where}: a half of a request has one output; leave out n", where)
    if holds:
        if not sampling.HasField("max_tokens") or sampling.max_tokens != 1:
            raise errors.InvalidArgument(f"{where}: {_HOLD} computes one token; send max_tokens 1", where)
        sampling.max_tokens = 2  # one that ends the output by its length would leave no KV
        return output_processor_pb2.KVHandover(hold=True)
    if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
        raise errors.InvalidArgument(f"{where}: only the prefill has log probabilities of its token", where)
    if lacking := [name for name in _OF_SOURCE if name not in values]:
        raise errors.InvalidArgument(f"{where}.{lacking[0]} is missing; send what the prefill has returned", where)
    return output_processor_pb2.KVHandover(source=_source(values, where), first_token_id=_number(values, where, 4))


def _source(values: dict[str, Any], where: str) -> engine_pb2.KVSource:
    engine_id, epoch, lease = (values[name] for name in _OF_SOURCE[:3])
    try:
        numbers = int(epoch, 16), bytes.fromhex(lease), bytes.fromhex(values.get(_WEIGHTS, ""))
    except (TypeError, ValueError):
        message = f"{where}: epoch, lease and weights are not what a prefill has returned"
        raise errors.InvalidArgument(message, where) from None
    if not isinstance(engine_id, str) or not 0 <= numbers[0] < 2**64 or len(numbers[1]) != _LEASE_BYTES:
        raise errors.InvalidArgument(f"{where}: engine, epoch or lease is not what a prefill has returned", where)
    if len(numbers[2]) not in (0, _WEIGHTS_BYTES):
        raise errors.InvalidArgument(f"{where}.{_WEIGHTS} is not what a prefill has returned", where)
    return engine_pb2.KVSource(
        engine_id=engine_id,
        engine_epoch=numbers[0],
        lease_id=numbers[1],
        num_tokens=_number(values, where, 3),
        weights=numbers[2],
    )


def _number(values: dict[str, Any], where: str, index: int) -> int:
    name = _OF_SOURCE[index]
    return narrow_int(f"{where}.{name}", values[name], 0, 2**32 - 1)


_LEASE_BYTES, _WEIGHTS_BYTES = 16, 32


def kv_member(finished: output_processor_pb2.RequestFinished | None, token_ids: Sequence[int]) -> dict[str, Any] | None:
    """Return the parameters by which another request continues from KV that was left; None: none was."""
    if finished is None or not finished.HasField("kv"):
        return None
    kv = finished.kv
    named = kv.engine_id, f"{kv.engine_epoch:x}", kv.lease_id.hex(), kv.num_tokens, token_ids[0]
    weights = {_WEIGHTS: kv.weights.hex()} if kv.weights else {}
    return {_READ: True, _HOLD: False, **dict(zip(_OF_SOURCE, named, strict=True)), **weights}


def _shown(fields: TokenGenerationRequest) -> Chat | None:
    """Return a prompt beside images or sounds, whose tokens are known; None: it has none. Raises as
    :meth:`TokensApi.read`."""
    features, parts, options = fields.features, fields.content_parts, fields.mm_processor_kwargs
    if features is not None and parts:
        raise errors.InvalidArgument("content_parts and features exclude each other", "content_parts")
    if features is None and not parts:
        if options:
            raise errors.InvalidArgument("mm_processor_kwargs needs features or content_parts", "mm_processor_kwargs")
        return None
    from ..records.media import read_options, read_part  # here: most prompts have none

    media: list[MediaPart] = []
    places: list[tuple[int, int]] = []
    if features is not None:
        found = sorted(_featured(features), key=lambda each: each[1])
        media, places = [part for part, _ in found], [place for _, place in found]
    for index, part in enumerate(parts or ()):
        where = f"content_parts[{index}]"
        members = {"type": part.type, "uuid": part.uuid, "field": f"{where}.url", part.type: part.url}
        media.append(read_part(where, members))
    if not media:
        return None
    ids = narrow_token_ids("token_ids", fields.token_ids)
    return Chat(b"", media=media, media_options=read_options(options), token_ids=ids, places=places)


def _featured(features: PromptFeatures) -> "Iterator[tuple[MediaPart, tuple[int, int]]]":
    """Yield the images and sounds that are named by their files, and where they stand."""
    from ..records.media import MODALITIES, MediaPart, read_digest

    for name in ("kwargs_data", "mm_metadata"):
        held: dict[str, list[Any]] = getattr(features, name) or {}
        if any(item is not None for items in held.values() for item in items):
            message = f"features.{name}: what another server's processor made is not taken; send content_parts"
            raise errors.InvalidArgument(message, f"features.{name}")
    kinds = {modality: kind for kind, modality in MODALITIES.items()}
    for modality, hashes in features.mm_hashes.items():
        field, ranges = f"features.mm_hashes.{modality[:64]}", features.mm_placeholders.get(modality, [])
        if modality not in kinds:
            raise errors.InvalidArgument(f"{field}: known are {' and '.join(kinds)}", field)
        if len(ranges) != len(hashes):
            message = f"features.mm_placeholders has {len(ranges)} places for {len(hashes)} of {modality}"
            raise errors.InvalidArgument(message, "features.mm_placeholders")
        for index, (digest, place) in enumerate(zip(hashes, ranges, strict=True)):
            where = f"{field}[{index}]"
            part = MediaPart(where, digest=read_digest(where, digest), kind=kinds[modality])
            yield part, (place.offset, place.length)
    if other := sorted(features.mm_placeholders.keys() - features.mm_hashes.keys()):
        field = f"features.mm_placeholders.{other[0][:64]}"
        raise errors.InvalidArgument(f"{field} has no mm_hashes", field)


class TokensAnswer:
    """Shapes outputs in tokens, and in text too if the client asks for it."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        fields = base.options.request
        assert isinstance(fields, TokenGenerationRequest)
        self._is_text = fields.output_mode == "text"
        resumed = base.resumed
        self._returns_prompt = bool(fields.return_token_ids) and (resumed is None or not resumed.entries)
        self._id = f"generate-tokens-{fields.request_id or base.generation.request_id}"
        self._has_logprobs = base.options.num_logprobs is not None
        outputs = range(base.generation.num_outputs)
        self._logprobs = [JsonBlocks() for _ in outputs]
        self._token_ids: list[list[int]] = [[] for _ in outputs]
        self._texts: list[list[str]] = [[] for _ in outputs]
        self._head = sse.encode_json({"request_id": self._id})[:-1]
        mode = b'"text"' if self._is_text else b'"tokens"'
        self._tail = b',"output_mode":%b' % mode

    def first_events(self) -> bytes:
        """Return the events before any output."""
        return b""

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""
        if (ids := self._base.ids) is not None:
            ids.advance(delta)
        if not (delta.token_ids or delta.finished is not None or (self._is_text and delta.text)):
            return b""
        if delta.logprobs and not self._logprobs[delta.index]:
            for _ in self.shape(delta):
                pass
        extra = b""
        if self._returns_prompt:
            self._returns_prompt = False
            prompt = list(self._base.generation.prompt_of(0))
            extra = b',"prompt_token_ids":%b' % sse.encode_json(prompt)
        choice = b"".join(self._choice(delta.index, delta.token_ids, delta.text, delta))
        if (kv := kv_member(delta.finished, delta.token_ids)) is not None:
            extra += b',"kv_transfer_params":%b' % sse.encode_json(kv)
        if (usage := self._base.usage_of(delta.index)) is not None:
            extra += b',"usage":%b' % sse.encode_json(sse.usage_object(usage))
        line = b"" if ids is None else ids.line(delta.index, "" if delta.finished is None else FINISHED)
        return line + self._event(choice, extra)

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""
        self.events(delta)
        self._base.repeated(delta.index)

    def last_events(self) -> bytes:
        """Return the events after all output."""
        base = self._base
        if not base.options.include_usage or (base.resumed is not None and base.resumed.usage_sent):
            return sse.DONE
        line = b"" if base.ids is None else base.ids.last_line()
        return line + self._event(b"", b',"usage":%b' % sse.encode_json(sse.usage_object(base.usage))) + sse.DONE

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""
        return len(delta.logprobs) > MANY_PARTS

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""
        blocks, num_values = self._logprobs[delta.index], 0
        as_ids = self._base.options.tokens_as_ids
        for at in self._base.positions(delta):
            blocks.add(chat_entry(at, as_ids=as_ids) if self._is_text else tokens_entry(at))
            num_values += 1 + len(at.ids)
            if num_values >= VALUES_PER_STEP:
                yield num_values
                num_values = 0
        yield num_values

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""
        self._token_ids[delta.index] += delta.token_ids
        self._texts[delta.index].append(delta.text)
        return self.shape(delta) if delta.logprobs else None

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""
        base = self._base
        head = base.head("")
        yield self._head + b',"model":%b,"created":%b' % (
            sse.encode_json(head["model"]),
            sse.encode_json(head["created"]),
        )
        yield self._tail + b',"choices":['
        for index, token_ids in enumerate(self._token_ids):
            if index:
                yield b","
            yield from self._choice(index, token_ids, "".join(self._texts[index]), None)
        yield b'],"usage":%b' % sse.encode_json(sse.usage_object(base.usage))
        if base.options.num_prompt_logprobs is None:
            yield b',"prompt_logprobs":null'
        else:
            yield from base.prompt_logprobs(0)
        prompt = list(base.generation.prompt_of(0)) if self._returns_prompt else None
        kv = kv_member(base.generation.finished.get(0), self._token_ids[0])
        yield b',"prompt_token_ids":%b,"kv_transfer_params":%b}' % (sse.encode_json(prompt), sse.encode_json(kv))

    def _choice(self, index: int, token_ids: list[int], text: str, delta: Delta | None) -> Iterator[bytes]:
        """Return an output in blocks. ``delta``: the one that an event holds; None: the whole output."""
        finished = self._base.generation.finished[index] if delta is None else delta.finished
        yield b'{"index":%d' % index
        if self._is_text:
            yield b',"text":%b' % sse.encode_json(text)
        yield b',"token_ids":%b,"logprobs":' % sse.encode_json(token_ids)
        if self._has_logprobs:
            yield b'{"content":['
            yield from self._logprobs[index].take()
            yield b"]}"
        else:
            yield b"null"
        reason = None if finished is None else finish_reason(finished)
        stop = None if finished is None else self._base.stop_reason(finished)
        members = {} if finished is None else origin_members(finished)
        yield sse.members({"finish_reason": reason, "stop_reason": stop} | members) + b"}"

    def _event(self, choice: bytes, extra: bytes) -> bytes:
        return b'data: %b%b,"choices":[%b]%b}\n\n' % (self._head, self._tail, choice, extra)


def tokens_entry(at: TokenPosition) -> bytes:
    """Return the JSON of one entry of ``logprobs.content``: tokens by their ids, the output's own first."""
    own = {"token_id": at.token_id, "logprob": at.logprob, "rank": at.rank}
    others = zip(at.ids, at.logprobs, at.ranks, strict=True)
    rest = [
        {"token_id": token, "logprob": logprob, "rank": rank} for token, logprob, rank in others if token != at.token_id
    ]
    num_best = len(at.ids)
    return sse.encode_json(own | {"top_logprobs": [own, *rest][: max(num_best, 1)]})
