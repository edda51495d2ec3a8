"""An endpoint that generates: reads a body, runs the request and writes JSON or a stream of events."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, pick_headers

from ..adapters.model_names import ModelNames
from ..generation.claim import Claim
from ..generation.delivered import Delivered
from ..generation.generation import Generation
from ..generation.generator import Generator
from ..generation.job import Job
from ..mesh.collector import Delta
from ..openai.openai_models import Body, Options
from ..tenants.tenant import Tenant
from . import orca, sse
from .claims import read_claim
from .exchange import Exchange
from .exchange import Headers as HeaderPairs
from .json_body import BodyParser
from .pieces import respond_in_pieces
from .turn_share import TurnShare

log = logging.getLogger(__name__)

Asked = tuple[Job, Options, Claim]
"""What a client asks for."""

VALUES_PER_SLICE = 4096
"""Log probabilities that one request may shape in one turn of the event loop: a few milliseconds."""
RANK_HEADER = b"x-data-parallel-rank"
"""Names the engine of a data-parallel group that must serve the request (as in vLLM)."""
_MAX_RANK_DIGITS = 9
IGNORED_HEADER = b"x-tokenloom-ignored"
"""Names the fields of the body that had no effect."""
MAX_IGNORED = 32
"""Limits the names in that header."""
MAX_NAME = 64
"""Limits the length of each."""


class Answer(Protocol):
    """Shapes the output of one request."""

    def first_events(self) -> bytes:
        """Return the events before any output."""

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""

    def last_events(self) -> bytes:
        """Return the events after all output."""

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""


class Api(Protocol):
    """Reads the bodies of an API and makes its answers."""

    @property
    def is_resumable(self) -> bool:
        """Whether its events have ids from which a stream can be resumed."""

    def read(self, body: Body, tenant: Tenant) -> tuple[Job, Options]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""

    def answer(self, generation: Generation, options: Options) -> Answer:
        """Return what shapes the answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Runs an API that generates."""

    api: Api
    generator: Generator
    names: ModelNames
    parser: BodyParser
    max_body_bytes: int
    answers: TurnShare
    """Limits the answers that begin and end in one turn of the event loop."""
    stream_headers: HeaderPairs = sse.HEADERS

    async def __call__(self, exchange: Exchange) -> None:
        await self.run(exchange, [await self.read(exchange)])

    async def run(self, exchange: Exchange, asked: list[Asked]) -> None:
        """Answer what was read. ``asked`` holds it alone and is emptied: its prompts must not live as long as the
        answer."""
        options, claim = asked[0][1:]
        headers = trace_headers(exchange)
        with exchange.until_disconnected():
            async with self.generator.open(asked.pop()[0], headers, claim) as generation:
                if log.isEnabledFor(logging.DEBUG):
                    RequestLog(log, generation.request_id).debug("is the client's %s", exchange.request_id.decode())
                answer = self.api.answer(generation, options)
                if options.stream:
                    deltas = await generation.take()  # an error before the first output still gets its own status
                    await self.answers.wait()
                    await exchange.start(200, [*self.stream_headers, *self._headers(exchange, options)])
                    events = answer.first_events()
                    if options.resumed is not None:
                        delivered = Delivered(options.resumed.positions)
                        events = await _repeat(exchange, generation, answer, delivered, deltas, events)
                        deltas = []
                    await _stream(exchange, generation, answer, deltas, events, self.answers)
                else:
                    await _whole(exchange, generation, answer, self._headers(exchange, options))

    async def read(self, exchange: Exchange) -> Asked:
        """Return what the body asks for, and which request of the mesh it is."""
        with await exchange.read_body(self.max_body_bytes) as received:
            job, options = await self.parser.read(received.data, partial(self._job, exchange.tenant))
            if not self.api.is_resumable and b"last-event-id" in exchange.headers:
                raise errors.InvalidArgument("streams of this API cannot be resumed", "Last-Event-ID")
            if exchange.internal_tenant is not None:
                job = replace(job, is_sheddable=True)
            if (rank := exchange.headers.get(RANK_HEADER)) is not None:
                job = replace(job, data_parallel_rank=read_rank(rank))
            options, claim = read_claim(exchange, received.data, job, options)
            return job, options, claim

    def _job(self, tenant: Tenant, body: Body) -> tuple[Job, Options]:
        adapter = self.names.find(body.get("model"))
        job, options = self.api.read(body, tenant)
        return job if adapter is None else replace(job, adapter=adapter), options

    def _headers(self, exchange: Exchange, options: Options) -> HeaderPairs:
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


def trace_headers(exchange: Exchange) -> Headers:
    """Return the headers of the trace that the client has begun."""
    if b"traceparent" not in exchange.headers:
        return NO_HEADERS
    return pick_headers((name.decode("latin-1"), value) for name, value in exchange.headers.items())


async def _repeat(
    exchange: Exchange, generation: Generation, answer: Answer, delivered: Delivered, deltas: list[Delta], events: bytes
) -> bytes:
    """Write the rest of a resumed stream, up to where all that follows is new to the client. Return the events that are
    left to write. ``events``: what comes before ``deltas``."""
    slices = Slices()
    while True:
        for delta in deltas:
            for part, is_new in delivered.cut(delta):
                if part.logprobs and answer.is_large(part):
                    await slices.run(answer.shape(part))
                if is_new:
                    events += answer.events(part)
                else:
                    answer.repeat(part)
        if delivered.is_over or generation.done:
            return events
        if events:
            await exchange.write(events)
            events = b""
        deltas = await generation.take()


async def _stream(
    exchange: Exchange, generation: Generation, answer: Answer, deltas: list[Delta], events: bytes, ends: TurnShare
) -> None:
    """Write the body of a stream, from its first deltas on. ``events``: what comes before them. ``ends``: limits the
    ends in one turn of the event loop."""
    direct = exchange.direct

    def write_now(delta: Delta) -> bool:
        """Write output without waking this task, if the connection can take it."""
        if direct is None or not direct.is_open:
            return False
        if delta.logprobs and answer.is_large(delta):
            return False
        generation.count(delta)
        if events := answer.events(delta):
            direct.write(events)
        return True

    slices = Slices()
    while True:
        for delta in deltas:
            if delta.logprobs and answer.is_large(delta):
                await slices.run(answer.shape(delta))
            events += answer.events(delta)
        if generation.done:
            await ends.wait()
            await exchange.finish(events + answer.last_events())
            return
        if events:
            await exchange.write(events)
            events = b""
        deltas = await generation.take(write_now)


async def _whole(exchange: Exchange, generation: Generation, answer: Answer, headers: HeaderPairs) -> None:
    """Collect the output, shape it and write it, in slices between which the event loop runs."""
    slices = Slices()
    while not generation.done:
        for delta in await generation.take():
            if (steps := answer.add(delta)) is not None:
                await slices.run(steps)
    await respond_in_pieces(exchange, answer.body(), headers)


class Slices:
    """Counts the log probabilities that a request has shaped since the event loop last ran."""

    def __init__(self) -> None:
        self._num_values = 0

    async def run(self, steps: Iterator[int]) -> None:
        """Run the steps, each of which yields how many values it has shaped; let the event loop run in between."""
        for num_values in steps:
            self._num_values += num_values
            if self._num_values >= VALUES_PER_SLICE:
                self._num_values = 0
                await asyncio.sleep(0)
