"""An endpoint that generates: reads a body, runs the request and writes JSON or a stream of events."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, pick_headers

from ..encoding import sse
from ..generation.generator import Generator
from ..generation.running_generation import RunningGeneration
from ..http.client_flow import TurnShare
from ..http.http_exchange import HttpExchange, respond_in_pieces
from ..http.json_body import BodyParser
from ..http.response_writer import Headers as HeaderPairs
from ..openai.body_reader import AnswerOptions, Body
from ..openai.event_ids import FIELD, MAX_OUTPUTS, NO_EVENT, parse_event_id
from ..records.generate_request import Chat, GenerateRequest
from ..records.model_names import ModelNames
from ..records.request_ids import NEW, ResumeToken, fingerprint, token_of_key, tokens_of
from ..tenants.tenant import Tenant
from . import orca
from .answer_stream import AnswerShaper, AnswerStream, SilentStreams, Slices

log = logging.getLogger(__name__)

ReadRequest = tuple[GenerateRequest, AnswerOptions, ResumeToken]
"""What a client asks for."""

RANK_HEADER = b"x-data-parallel-rank"
"""Names the engine of a data-parallel group that must serve the request (as in vLLM)."""
_MAX_RANK_DIGITS = 9
IGNORED_HEADER = b"x-tokenloom-ignored"
"""Names the fields of the body that had no effect."""
KEY_FIELD = "Idempotency-Key"
"""Names a request, so that a client may repeat it safely."""
MAX_IGNORED = 32
"""Limits the names in that header."""
MAX_NAME = 64
"""Limits the length of each."""


class GenerationApi(Protocol):
    """Reads the bodies of an API and makes its answers."""

    @property
    def is_resumable(self) -> bool:
        """Whether its events have ids from which a stream can be resumed."""

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> AnswerShaper:
        """Return what shapes the answer."""


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """Runs an API that generates."""

    api: GenerationApi
    generator: Generator
    names: ModelNames
    parser: BodyParser
    max_body_bytes: int
    answers: TurnShare
    """Limits the answers that begin and end in one turn of the event loop."""
    silent: SilentStreams
    """Looks at its streams."""
    stream_headers: HeaderPairs = sse.HEADERS

    async def __call__(self, exchange: HttpExchange, held: list[ReadRequest] | None = None) -> None:
        """Answer a request. ``held``: what was read of it; None: it is read here."""
        # The list alone holds what was read and is emptied: the prompts must not live as long as the answer.
        held = [await self.read(exchange)] if held is None else held
        options, token = held[0][1:]
        headers = trace_headers(exchange) if b"traceparent" in exchange.headers else NO_HEADERS
        try:
            with exchange.until_disconnected():
                async with self.generator.open(held.pop()[0], headers, token) as generation:
                    if log.isEnabledFor(logging.DEBUG):
                        RequestLog(log, generation.request_id).debug("is the client's %s", exchange.request_id.decode())
                    answer = self.api.answer(generation, options)
                    if options.stream:
                        make_headers = partial(self._stream_headers, exchange, options)
                        stream = AnswerStream(exchange, generation, answer, self.answers, make_headers, self.silent)
                        await stream.run(options.resumed)
                    else:
                        await _whole(exchange, generation, answer, self._headers(exchange, options))
        except errors.InvalidArgument as error:
            raise error.renamed(options.field_names) from error

    async def read(self, exchange: HttpExchange) -> ReadRequest:
        """Return what the body asks for, and which request of the mesh it is."""
        body = await exchange.read_body(self.max_body_bytes)
        headers, token = exchange.headers, NEW
        request, options = await self.parser.read(body.data, partial(self._generate_request, exchange.tenant))
        if not self.api.is_resumable and b"last-event-id" in headers:
            raise errors.InvalidArgument("streams of this API cannot be resumed", "Last-Event-ID")
        # A line of a batch. It may begin only while a quarter of the seats stay free, because under the policy fcfs a
        # request that runs keeps its seat.
        if exchange.internal_tenant is not None:
            request = replace(request, is_sheddable=True)
        if (rank := headers.get(RANK_HEADER)) is not None:
            request = replace(request, data_parallel_rank=read_rank(rank))
        if b"last-event-id" in headers or b"idempotency-key" in headers:
            options, token = _read_resume_token(exchange, body.data, request, options)
        # After the fingerprint, which is made of the bytes of the body. They must not live as long as the answer; after
        # an error, the application drops them.
        body.close()
        return request, options, token

    def _generate_request(self, tenant: Tenant, body: Body) -> tuple[GenerateRequest, AnswerOptions]:
        adapter = self.names.find(body.get("model"))
        request, options = self.api.read(body, tenant)
        return request if adapter is None else replace(request, adapter=adapter), options

    def _stream_headers(self, exchange: HttpExchange, options: AnswerOptions) -> HeaderPairs:
        return (*self.stream_headers, *self._headers(exchange, options))

    def _headers(self, exchange: HttpExchange, options: AnswerOptions) -> HeaderPairs:
        """Return the mesh's present load, if the client asks for it, and the fields that had no effect."""
        wanted = exchange.headers.get(orca.REQUEST_HEADER)
        load = () if wanted is None else orca.response_headers(wanted, self.generator.mesh_load)
        return (*load, (IGNORED_HEADER, listed(options.ignored))) if options.ignored else load


def read_rank(value: bytes) -> int:
    """Return the number of the data-parallel rank that a client names. Raises ``InvalidArgument``."""
    if not value.isdigit() or len(value) > _MAX_RANK_DIGITS:
        raise errors.InvalidArgument(
            "X-data-parallel-rank must be the number of a rank, from 0 on", "X-data-parallel-rank"
        )
    return int(value)


def listed(names: Sequence[str]) -> bytes:
    """Return names as a header's value; those that a header cannot hold are left out."""
    fit = [name for name in names[:MAX_IGNORED] if name.isascii() and name.isprintable() and len(name) <= MAX_NAME]
    return ", ".join(fit).encode()


def trace_headers(exchange: HttpExchange) -> Headers:
    """Return the headers of the trace that the client has begun."""
    if b"traceparent" not in exchange.headers:
        return NO_HEADERS
    return pick_headers((name.decode("latin-1"), value) for name, value in exchange.headers.items())


async def _whole(
    exchange: HttpExchange, generation: RunningGeneration, answer: AnswerShaper, headers: HeaderPairs
) -> None:
    """Collect the output, shape it and write it, in slices between which the event loop runs."""
    slices = Slices()
    while not generation.done:
        for delta in await generation.take():
            if (steps := answer.add(delta)) is not None:
                await slices.run(steps)
    await respond_in_pieces(exchange, answer.body(), headers)


def _read_resume_token(
    exchange: HttpExchange, body: bytes | bytearray, request: GenerateRequest, options: AnswerOptions
) -> tuple[AnswerOptions, ResumeToken]:
    """Return the options of a call, and by which token it resumes a stream or repeats a request, as its headers ask.

    Raises ``InvalidArgument`` for a header that is malformed, or that the request cannot have.
    """
    last_id, key = exchange.headers.get(b"last-event-id"), exchange.headers.get(b"idempotency-key")
    # The path belongs to the body: the same JSON at another endpoint is another request.
    digest = fingerprint(exchange.path, body)
    token = NEW if key is None else token_of_key(request.tenant.name, key.decode("latin-1"), digest, KEY_FIELD)
    if last_id is None:
        return options, token
    text = last_id.decode("latin-1").strip()
    if text not in NO_EVENT:
        event = parse_event_id(text)
        if not options.stream:
            raise errors.InvalidArgument(f"{FIELD} resumes streams only: the body must have stream set to true", FIELD)
        if len(event.entries) and max(event.entries) >= _num_outputs(request):
            raise errors.InvalidArgument(f"{FIELD} is of an answer with more outputs than the body asks for", FIELD)
        delivered = tokens_of(event.positions)
        token = ResumeToken(event.request_id, digest, resumes=True, num_delivered=delivered)
        return replace(options, event_ids=True, resumed=event), token
    if not options.stream or _num_outputs(request) > MAX_OUTPUTS:
        return options, token
    return replace(options, event_ids=True), token if token.fingerprint else ResumeToken(fingerprint=digest)


def _num_outputs(request: GenerateRequest) -> int:
    return (1 if isinstance(request.prompts, Chat) else len(request.prompts)) * request.num_samples
