"""An endpoint that generates: reads a body, runs the request and writes JSON, or a stream of events, mostly without
waking the task of the request."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from tokenloom.request import errors
from tokenloom.request.limits import TTFT_DEADLINE
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers

from ..encoding import sse
from ..generation.delivered import Delivered
from ..generation.running_generation import RunningGeneration
from ..http.client_flow import ClientDisconnected, TurnShare
from ..http.client_flow import Headers as HeaderPairs
from ..http.http_exchange import IGNORED_HEADER, HttpExchange, listed, respond_in_pieces, trace_headers
from ..http.request_body import BodyParser
from ..mesh.collector import Delta
from ..mesh.mesh_view import MeshLoad
from ..openai.body_reader import AnswerOptions, Body, num_outputs_of, read_claim
from ..openai.event_ids import (
    FINISHED,
    MAX_OUTPUTS,
    EventId,
    HeldAnswer,
    IdKind,
    NumberedAnswer,
    StreamedAnswer,
)
from ..records.generate_request import SESSION_HEADERS, Chat, GenerateRequest, session_of_headers
from ..records.model_names import ModelNames
from ..records.request_ids import NEW, ResumeToken, fingerprint, tokens_of
from ..records.volatile_lines import AGENTS, VolatileLine, lines_of, settled
from ..tenants.tenant import Tenant
from . import orca

if TYPE_CHECKING:
    from ..http.body_files import BodyFiles
    from ..http.held_response import HeldResponse

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks at the streams."""
REPEAT_SECONDS = 10.0
"""A client whose stream has begun gets something to skip after so long a silence, and again after each further one."""


class LiveStream(Protocol):
    """Describes what is looked at."""

    def look(self, head_after: float) -> None:
        """Note whether anything was written since the last look, and write what the client skips if it is time.

        ``head_after``: seconds after which the head of the response is sent.
        """


class SilentStreams:
    """Looks at every live stream once a second.

    The client of a prompt that waited in an engine's queue received nothing for as long as it waited, and proxies and
    SDKs gave up. Nothing is measured for each token: a stream only notes that it has written.
    """

    def __init__(self, head_after: float) -> None:
        """``head_after``: seconds without output after which the head of a response is sent; 0: it waits for output."""
        self._head_after = head_after
        self._streams: set[LiveStream] = set()  # at most those of the gateway's connections
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: LiveStream) -> None:
        """Look at a stream from now on."""
        self._streams.add(stream)
        if self._timer is None and self._head_after:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def remove(self, stream: LiveStream) -> None:
        """Look at it no more."""
        self._streams.discard(stream)

    def _look(self) -> None:
        self._timer = None
        if self._streams:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        for stream in tuple(self._streams):
            stream.look(self._head_after)


VALUES_PER_SLICE = 4096
"""Log probabilities that one request may shape in one turn of the event loop: a few milliseconds."""


class StreamShaper(StreamedAnswer, Protocol):
    """Shapes the output of one request as a stream."""

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""


class AnswerShaper(StreamShaper, Protocol):
    """Shapes the output of one request, as a stream or whole."""

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""


class AnswerStream:
    """Writes an answer. Once its reader waits, output is written when it arrives: its first piece with the head of the
    response. The task of the request wakes for what takes long or has to wait, and for the end."""

    def __init__(
        self,
        exchange: HttpExchange,
        generation: RunningGeneration,
        answer: StreamShaper,
        turns: TurnShare,
        headers: Callable[[], HeaderPairs],
        silent: SilentStreams,
        *,
        is_direct: bool = True,
        held: "HeldResponse | None" = None,
    ) -> None:
        """``turns``: limits the answers that begin and end in one turn of the event loop. ``headers``: makes those of
        the response, when it begins. ``silent``: looks at this stream while it lives. ``is_direct``: output may be
        written when it arrives; False: it may come in large pieces, which take long to shape. ``held``: stores an
        answer of one output, of which ``answer`` is a :class:`HeldAnswer`; None: it has more, or nothing stores it."""
        self._exchange = exchange
        self._generation = generation
        self._answer = answer
        self._turns = turns
        self._headers = headers
        self._slices = Slices()
        self._is_direct = is_direct
        self._held = held
        self._shaper = answer.answer if held is not None and isinstance(answer, HeldAnswer) else answer
        self._silent = silent
        self._silent_seconds = 0.0
        self._has_first = False  # whether the first events were sent
        self._waits = False  # for output, and meanwhile :meth:`look` may write
        self._has_written = False  # since the last look

    async def run(self, resumed: EventId | None) -> None:
        """Write the answer to its end. ``resumed``: what the client has of it; None: it is new."""
        self._silent.add(self)
        try:
            self._waits = True
            # An error before the head still gets its own status.
            deltas = await self._generation.take(self._outlet() if resumed is None else None)
            self._waits = False
            events = b""
            if not self._has_first:
                await self._turns.wait()
                if not self._exchange.started:
                    await self._exchange.start(200, self._headers())
                events, self._has_first = self._answer.first_events(), True
            if resumed is not None:
                events = await self._repeat(Delivered(resumed.positions), deltas, events)
                deltas = []
            await self._write_rest(deltas, events)
        finally:
            self._waits = False
            self._silent.remove(self)

    def look(self, head_after: float) -> None:
        """See :class:`LiveStream`."""
        if self._has_written or not self._waits:
            self._has_written, self._silent_seconds = False, 0.0
            return
        self._silent_seconds += LOOK_SECONDS
        if self._silent_seconds >= (REPEAT_SECONDS if self._exchange.started else head_after):
            self._silent_seconds = 0.0
            if self._turns.take():
                self._keep_alive()
            else:
                self._turns.call(self._keep_alive)

    def _keep_alive(self) -> None:
        exchange = self._exchange
        if not self._waits or self._has_written:
            return  # output has come since
        if exchange.started:
            if exchange.response.is_open:
                exchange.response.write(self._answer.keep_alive())
        elif exchange.can_begin:
            exchange.begin(self._headers(), self._answer.keep_alive())

    async def _repeat(self, delivered: Delivered, deltas: list[Delta], events: bytes) -> bytes:
        """Write the rest of a resumed stream, up to where all that follows is new to the client. Return the events that
        are left to write. ``events``: what comes before ``deltas``."""
        exchange, generation, answer = self._exchange, self._generation, self._answer
        while True:
            for delta in deltas:
                for part, is_new in delivered.cut(delta):
                    if part.logprobs and answer.is_large(part):
                        await self._slices.run(answer.shape(part))
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

    async def _write_rest(self, deltas: list[Delta], events: bytes) -> None:
        """Write the body from some deltas on. ``events``: what comes before them."""
        exchange, generation, answer = self._exchange, self._generation, self._answer
        while True:
            for delta in deltas:
                if (delta.logprobs or not self._is_direct) and answer.is_large(delta):
                    await self._slices.run(answer.shape(delta))
                events += answer.events(delta)
            if generation.done:
                await self._turns.wait()
                await exchange.finish(events + answer.last_events())
                return
            if events:
                await exchange.write(events)
                events, self._has_written = b"", True
            self._waits = True
            deltas = await generation.take(self._outlet())
            self._waits = False

    def _outlet(self) -> Callable[[Delta], bool] | None:
        """Return what writes output when it arrives; None: the task of the request does."""
        # Not kept: what refers to this object would keep it, and itself, until the garbage collector runs.
        if not self._is_direct:
            return None
        return self._write_now if self._held is None else self._write_held

    def _write_now(self, delta: Delta) -> bool:
        """Write output without waking the task of the request, if that takes no time and the connection has room."""
        exchange, answer = self._exchange, self._answer
        if delta.logprobs and answer.is_large(delta):
            return False
        if not self._has_first:
            return self._begin_now(delta)
        if not exchange.response.is_open:
            return False
        self._generation.count(delta)
        if events := answer.events(delta):
            exchange.response.write(events)
            self._has_written = True
        return True

    def _write_held(self, delta: Delta) -> bool:
        """Do the same for an answer of one output that is stored."""
        # As many calls as there: with a position and bytes that were stored by calls of their own, a token took 1.7 µs
        # more than the 3.8 that it takes from the frame to the kernel.
        if delta.logprobs or not self._has_first:
            return self._write_now(delta)
        held = self._held
        assert held is not None
        if held.flow.write_paused or held.flow.is_lost:
            return False
        self._generation.count(delta)
        if events := self._shaper.events(delta):
            held.put(events, len(delta.token_ids), len(delta.text))
            self._has_written = True
        else:
            held.skip(len(delta.token_ids), len(delta.text))
        return True

    def _begin_now(self, delta: Delta) -> bool:
        """Begin the response with its first output, if the answers that begin in this turn leave time for it."""
        # A step may begin hundreds of answers. Those beyond this turn's share are begun by their own tasks, in later
        # turns.
        exchange = self._exchange
        if not (exchange.response.is_open if exchange.started else exchange.can_begin) or not self._turns.take():
            return False
        self._generation.count(delta)
        events = self._answer.first_events() + self._answer.events(delta)
        self._has_first = self._has_written = True
        if not exchange.started:
            exchange.begin(self._headers(), events)
        elif events:
            exchange.response.write(events)
        return True


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


ReadRequest = tuple[GenerateRequest, AnswerOptions, ResumeToken]
"""What a client asks for."""

RANK_HEADER = b"x-data-parallel-rank"
"""Names the engine of a data-parallel group that must serve the request (as in vLLM)."""
_MAX_RANK_DIGITS = 9
VOLATILE_HEADER = b"x-tokenloom-volatile"
"""Names the lines that were taken out of the system prompt or moved, because its client changes them."""


class EarlyStream:
    """Begins the response to a request that waits for the first engine that its gateway knows: until then there is no
    generation, and so no :class:`AnswerStream`."""

    def __init__(self, exchange: HttpExchange, headers: Callable[[], HeaderPairs]) -> None:
        """``headers``: makes those of the response, server-sent events."""
        self._exchange = exchange
        self._headers = headers
        self._silent_seconds = 0.0

    def look(self, head_after: float) -> None:
        """See :class:`LiveStream`."""
        exchange = self._exchange
        self._silent_seconds += LOOK_SECONDS
        if self._silent_seconds < (REPEAT_SECONDS if exchange.started else head_after):
            return
        self._silent_seconds = 0.0
        if not exchange.started:
            if exchange.can_begin:
                exchange.begin(self._headers(), sse.KEEP_ALIVE)
        elif exchange.response.is_open:
            exchange.response.write(sse.KEEP_ALIVE)


class GenerationApi(Protocol):
    """Reads the bodies of an API and makes its answers."""

    @property
    def event_ids(self) -> IdKind:
        """What the ids of its events say, from which a stream can be resumed."""

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`errors.InvalidArgument` naming the field."""

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> AnswerShaper:
        """Return what shapes the answer."""


class Opener(Protocol):
    """Opens generations, as a :class:`Generator` does."""

    @property
    def mesh_load(self) -> MeshLoad:
        """The engines' load, as last reported."""

    @property
    def knows_engines(self) -> bool:
        """Whether an engine has served since the start: until one does, :meth:`open` waits for it."""

    def open(
        self, request: GenerateRequest, trace_headers: Headers = ..., token: ResumeToken = ...
    ) -> AbstractAsyncContextManager[RunningGeneration]:
        """Run a generation for the length of the ``async with``."""

    def cancel(self, request_id: str, tenant: str) -> None:
        """End a request that can be resumed, at whichever gateway."""


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """Runs an API that generates."""

    api: GenerationApi
    generator: Opener
    names: ModelNames
    parser: BodyParser
    max_body_bytes: int
    answers: TurnShare
    """Limits the answers that begin and end in one turn of the event loop."""
    silent: SilentStreams
    """Looks at its streams."""
    volatile: Sequence[VolatileLine] | None = ()
    """Lines that are taken out of every system prompt, besides those of the client; None: prompts stay as they are."""
    files: "BodyFiles | None" = None
    """Takes the files out of large bodies; None: the model reads text only."""
    stream_headers: HeaderPairs = sse.HEADERS

    async def __call__(self, exchange: HttpExchange, held: list[ReadRequest] | None = None) -> None:
        """Answer a request. ``held``: what was read of it; None: it is read here."""
        # The list alone holds what was read and is emptied: the prompts must not live as long as the answer.
        held = [await self.read(exchange, is_plain=True)] if held is None else held
        options, token = held[0][1:]
        headers = trace_headers(exchange) if b"traceparent" in exchange.headers else NO_HEADERS
        early = None if self.generator.knows_engines else self._begin_early(exchange, options)
        try:
            with exchange.until_disconnected():
                async with self.generator.open(held.pop()[0], headers, token) as generation:
                    if early is not None:
                        self.silent.remove(early)
                    if log.isEnabledFor(logging.DEBUG):
                        RequestLog(log, generation.request_id).debug("is the client's %s", exchange.request_id.decode())
                    is_numbered = token.is_held and self.api.event_ids is IdKind.NUMBER
                    if (event := options.numbered) is not None or is_numbered:
                        options = shaped_again(options, generation.request_id)
                    answer = self.api.answer(generation, options)
                    if exchange.held is not None:
                        exchange.held.name(generation.request_id, _words(exchange, generation.num_outputs))
                    if options.stream:
                        make_headers = partial(self._stream_headers, exchange, options)
                        shaper: StreamShaper = answer
                        if token.is_held:
                            shaper = HeldAnswer(answer, exchange.held, has_first=_has_first(exchange))
                        if event is not None:
                            shaper = NumberedAnswer(answer, generation.request_id, event, generation.trust)
                        stream = AnswerStream(
                            exchange,
                            generation,
                            shaper,
                            self.answers,
                            make_headers,
                            self.silent,
                            is_direct=event is None,
                            held=exchange.held if generation.num_outputs == 1 else None,
                        )
                        await stream.run(options.resumed)
                    else:
                        await _whole(exchange, generation, answer, self._headers(exchange, options))
        except ClientDisconnected:
            # It may have left before this gateway asked for what another one had begun, and no other part would end it.
            if token.is_held and (token.resumes or token.takes_over):
                self.generator.cancel(token.request_id, exchange.tenant.name)
            raise
        except errors.InvalidArgument as error:
            raise error.renamed(options.field_names) from error
        finally:
            if early is not None:
                self.silent.remove(early)

    def _begin_early(self, exchange: HttpExchange, options: AnswerOptions) -> EarlyStream | None:
        """Return what keeps a stream alive while no engine is known; None: the client skips nothing before output."""
        if not options.stream or self.stream_headers is not sse.HEADERS:
            return None
        early = EarlyStream(exchange, partial(self._stream_headers, exchange, options))
        self.silent.add(early)
        return early

    async def read(self, exchange: HttpExchange, *, is_plain: bool = False) -> ReadRequest:
        """Return what the body asks for, and which request of the mesh it is. ``is_plain``: the answer is all that
        follows from it, so that another gateway may continue it."""
        body = await exchange.read_body(self.max_body_bytes, self.files)
        headers, token = exchange.headers, NEW
        lines, agent = self.volatile, headers.get(b"user-agent", b"")
        if lines is not None and agent.startswith(AGENTS):
            lines = lines_of(agent, lines)
        request, options = await self.parser.read(body.data, partial(self.read_fields, exchange.tenant, lines))
        if body.files is not None:
            from ..records.media import check_used  # here: most bodies have none

            request = replace(request, files=body.files)
            if not isinstance(request.prompts, Chat) or not request.prompts.media:
                check_used(body.files.files, ())
        if request.kv is not None and not exchange.is_of_peer:
            message = "kv_transfer_params is only for peers with a certificate of the mesh (--internal-listen)"
            raise errors.InvalidArgument(f"{message}; the mesh places prefill and decode itself", "kv_transfer_params")
        if exchange.is_line:
            if request.ttft_deadline is not None:  # refused for it, a line would be sent again until the batch ends
                raise errors.InvalidArgument(f"{TTFT_DEADLINE} is not available in batches", TTFT_DEADLINE)
            # It may begin only while a quarter of the seats stay free, because under the policy fcfs a request that
            # runs keeps its seat.
            request = replace(request, is_sheddable=True)
        if (rank := headers.get(RANK_HEADER)) is not None:
            request = replace(request, data_parallel_rank=read_rank(rank))
        if not SESSION_HEADERS.isdisjoint(headers) and (session := session_of_headers(headers)):
            request = replace(request, session=session)
        if b"last-event-id" in headers or b"idempotency-key" in headers:
            if exchange.let_go is not None:
                exchange.let_go()  # its client continues it elsewhere
            digest = fingerprint(exchange.path, body.data)
            options, token = read_claim(headers, digest, request, options, self.api.event_ids)
        elif is_plain and exchange.hold is not None:
            options, token = hold_answer(exchange, body.data, request, options)
        # After the fingerprint, which is made of the bytes of the body. They must not live as long as the answer; after
        # an error, the application drops them.
        body.close()
        return request, options, token

    def read_fields(
        self, tenant: Tenant, lines: Sequence[VolatileLine] | None, body: Body
    ) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the fields of a body ask for. ``lines``: taken out of the system prompt; None: none are. Raises
        ``InvalidArgument`` naming the field, and ``ModelNotFound``."""
        name = body.get("model")
        adapter = None if name in self.names.own else self.names.find(name)
        names: tuple[str, ...] = ()
        if lines:
            body, names = settled(body, lines)
        request, options = self.api.read(body, tenant)
        if names:
            options = replace(options, volatile=names)
        return request if adapter is None else replace(request, adapter=adapter), options

    def _stream_headers(self, exchange: HttpExchange, options: AnswerOptions) -> HeaderPairs:
        return (*self.stream_headers, *self._headers(exchange, options))

    def _headers(self, exchange: HttpExchange, options: AnswerOptions) -> HeaderPairs:
        """Return the mesh's present load, if the client asks for it, the fields that had no effect, and the lines of
        the system prompt that were taken out or moved."""
        wanted = exchange.headers.get(orca.REQUEST_HEADER)
        load = () if wanted is None else orca.response_headers(wanted, self.generator.mesh_load)
        if options.volatile:
            load = (*load, (VOLATILE_HEADER, ", ".join(options.volatile).encode()))
        return (*load, (IGNORED_HEADER, listed(options.ignored))) if options.ignored else load


def hold_answer(
    exchange: HttpExchange, body: bytes | bytearray, request: GenerateRequest, options: AnswerOptions
) -> tuple[AnswerOptions, ResumeToken]:
    """Let another gateway continue the answer from now on, if that can be, and continue that of another one. The client
    takes part in neither. Call it while ``exchange.hold`` is there."""
    assert exchange.hold is not None
    past = exchange.past
    if past is None and num_outputs_of(request) > MAX_OUTPUTS:
        return options, NEW
    held = exchange.held = exchange.hold(body)
    if past is None and held is None:
        return options, NEW
    created = int(time.time()) if past is None or not past.created else past.created
    if held is not None:
        held.created = created
    token = ResumeToken(fingerprint=fingerprint(exchange.path, body), is_held=True)
    options = replace(options, created=created)
    if past is None or not past.request_id:
        return options, token
    token = replace(token, request_id=past.request_id)
    if not past.has_begun:
        return options, replace(token, takes_over=True)
    entries = {
        index: f"{entry.num_tokens}-{entry.num_chars}{FINISHED if entry.is_finished else ''}"
        for index, entry in enumerate(past.entries)
        if entry.has_begun or past.has_first
    }
    event = EventId(past.request_id, created, entries, number=past.number)
    token = replace(token, resumes=True, num_delivered=tokens_of(event.positions))
    return replace(options, resumed=event), token


def _words(exchange: HttpExchange, num_outputs: int) -> list[int]:
    """Return how much of each output the client has, as it is stored."""
    past = exchange.past
    return [0] * num_outputs if past is None or not past.entries else [entry.word for entry in past.entries]


def _has_first(exchange: HttpExchange) -> bool:
    return exchange.past is not None and exchange.past.has_first


def shaped_again(options: AnswerOptions, request_id: str) -> AnswerOptions:
    """Return the options of an answer that has the same calls' ids whenever it is shaped."""
    if options.plan is None:
        return options
    return replace(options, plan=replace(options.plan, random=Random(request_id)))


def read_rank(value: bytes) -> int:
    """Return the number of the data-parallel rank that a client names. Raises ``InvalidArgument``."""
    if not value.isdigit() or len(value) > _MAX_RANK_DIGITS:
        raise errors.InvalidArgument(
            "X-data-parallel-rank must be the number of a rank, from 0 on", "X-data-parallel-rank"
        )
    return int(value)


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
