"""Defines what an endpoint for pooling calls reads and writes, and what all of them read alike."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_int
from tokenloom.v1 import types_pb2

from ..encoding import sse
from ..generation.generator import Generator
from ..generation.running_pooling import RunningPooling
from ..http.http_exchange import IGNORED_HEADER, HttpExchange, listed, respond_in_pieces, trace_headers
from ..http.request_body import BodyParser
from ..openai.body_reader import Body
from ..openai.chat import read_chat
from ..openapi.pooling_schemas import InputFields, PoolingFields
from ..records.generate_request import Chat, GenerateRequest
from ..records.model_names import ModelNames
from ..records.pooling_input import PoolingInput, check_count
from ..tenants.tenant import Tenant

Shape = Callable[[RunningPooling], Iterator[bytes]]
"""Yields the JSON of an answer in small blocks."""


class PoolingApi(Protocol):
    """Reads the bodies of one endpoint and shapes its answers."""

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        """Return what the body asks for, what shapes the answer, and the fields that have no effect. Raises
        :class:`errors.InvalidArgument` naming the field."""


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """Writes answers that hold a list with an object for each result."""

    prefix: str
    """Begins the answer's id."""

    def blocks(self, pooling: RunningPooling, items: Iterable[bytes]) -> Iterator[bytes]:
        """``items``: blocks of the list's JSON, with its commas."""
        head: dict[str, object] = {"id": f"{self.prefix}-{pooling.request_id}", "object": "list"}
        head |= {"created": int(time.time()), "model": pooling.model}
        yield sse.encode_json(head)[:-1] + b',"data":['
        yield from items
        yield tail(pooling)


def tail(pooling: RunningPooling) -> bytes:
    """Return the end of an answer, after the last object of its list."""
    return b"]" + sse.members({"usage": usage_object(pooling), **version_members(pooling)}) + b"}"


def version_members(pooling: RunningPooling) -> dict[str, object]:
    """Return the version of the weights that computed all results, as a member; nothing if the engines have none."""
    return {"weights_version": pooling.weights_version} if pooling.weights_version else {}


def usage_object(pooling: RunningPooling) -> dict[str, object]:
    """Return the usage as OpenAI's embeddings have it, with the cached tokens."""
    usage = pooling.usage
    details = {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, **details}


def make_generate_request(fields: PoolingFields, prompts: Any, field: str, tenant: Tenant) -> GenerateRequest:
    """Return the part of a body that pooling and generation share."""
    keep = fields.truncate_prompt_tokens
    return GenerateRequest(
        prompts,
        field,
        types_pb2.SamplingParams(),
        tenant=tenant,
        priority=fields.priority or 0,
        own_salt=fields.cache_salt or "",
        truncate_prompt_tokens=None if keep is None else narrow_int("truncate_prompt_tokens", keep, -1, 2**32 - 1),
        add_special_tokens=fields.add_special_tokens is not False,
    )


def read_inputs(fields: InputFields, tenant: Tenant) -> GenerateRequest:
    """Return the request of ``input`` or ``messages``."""
    if (fields.input is None) == (fields.messages is None):
        raise errors.InvalidArgument("exactly one of input and messages must be set", "input")
    if fields.messages is not None:
        return make_generate_request(fields, _chat(fields), "messages", tenant)
    prompts = split_inputs(fields.input, "input")
    check_count(len(prompts), "input")
    return make_generate_request(fields, prompts, "input", tenant)


def split_inputs(value: object, field: str) -> Sequence[str | Sequence[object]]:
    """Return one input or several, as texts or token ids; the ids are checked later, against the limits."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}  # values decoded from JSON have no subtypes
        if kinds in ({str}, {list}):
            return value
        if not kinds & {str, list, dict, type(None)}:
            return [value]
    raise errors.InvalidArgument(
        f"{field} must be a string, a list of strings, token ids or a list of token ids", field
    )


def keeps_first(fields: PoolingFields) -> bool:
    return fields.truncation_side == "right"


def ignored_fields(body: Body, fields: msgspec.Struct) -> Sequence[str]:
    """Return the names of a body's fields that have no effect."""
    known = frozenset(fields.__struct_fields__)
    return [name for name in body if name not in known and body[name] is not None]


def _chat(fields: InputFields) -> Chat:
    return read_chat(
        fields.messages or (),
        template_kwargs=fields.chat_template_kwargs,
        add_generation_prompt=bool(fields.add_generation_prompt),
        continue_final_message=fields.continue_final_message,
    )


@dataclass(frozen=True, slots=True)
class PoolingEndpoint:
    """Runs an API that pools."""

    api: PoolingApi
    generator: Generator
    names: ModelNames
    parser: BodyParser
    max_body_bytes: int

    async def __call__(self, exchange: HttpExchange) -> None:
        with await exchange.read_body(self.max_body_bytes) as received:
            with exchange.until_disconnected():
                await self.generator.wait_limits()  # what a body may ask for follows from them
            pooling_input, shape, ignored = await self.parser.read(received.data, partial(self._read, exchange.tenant))
        if exchange.is_line:
            pooling_input = replace(pooling_input, request=replace(pooling_input.request, is_sheddable=True))
        headers = [(IGNORED_HEADER, listed(ignored))] if ignored else []
        generator, trace = self.generator, trace_headers(exchange)
        with exchange.until_disconnected():
            async with generator.pool(pooling_input, trace, was_accepted=exchange.was_read) as pooling:
                await respond_in_pieces(exchange, shape(pooling), headers)

    def _read(self, tenant: Tenant, body: Body) -> tuple[PoolingInput, Shape, Sequence[str]]:
        adapter = self.names.find(body.get("model"))
        pooling_input, shape, ignored = self.api.read(body, tenant)
        return replace(pooling_input, request=replace(pooling_input.request, adapter=adapter)), shape, ignored
