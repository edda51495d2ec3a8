"""An endpoint that generates: reads a body, runs the request and writes JSON or a stream of events."""

import logging
from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, pick_headers

from ..generation.generation import Generation, Generator
from ..mesh.collector import Delta
from ..openai.chat import ChatAnswer, ChatApi
from ..openai.completions import CompletionAnswer, CompletionsApi
from . import orca, sse
from .exchange import Exchange, decode_object
from .exchange import Headers as HeaderPairs

log = logging.getLogger(__name__)

Api = ChatApi | CompletionsApi
Answer = ChatAnswer | CompletionAnswer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Runs one of OpenAI's APIs."""

    api: Api
    generator: Generator
    model: str
    max_body_bytes: int

    async def __call__(self, exchange: Exchange) -> None:
        with await exchange.read_body(self.max_body_bytes) as received:
            body = decode_object(received.data)
        check_model(body.get("model"), self.model)
        job, options = self.api.read(body, exchange.tenant)
        headers = _trace_headers(exchange) if b"traceparent" in exchange.headers else NO_HEADERS
        with exchange.until_disconnected():
            async with self.generator.open(job, headers) as generation:
                if log.isEnabledFor(logging.DEBUG):
                    RequestLog(log, generation.request_id).debug("is the client's %s", exchange.request_id.decode())
                answer = self.api.answer(generation, options)
                if options.stream:
                    deltas = await generation.take()  # an error before the first output still gets its own status
                    await exchange.start(200, [*sse.HEADERS, *self._load_headers(exchange)])
                    await _stream(exchange, generation, answer, deltas)
                else:
                    whole = await _whole(generation, answer)
                    await exchange.respond(200, whole, headers=self._load_headers(exchange))

    def _load_headers(self, exchange: Exchange) -> HeaderPairs:
        """Return the mesh's present load, if the client asks for it."""
        wanted = exchange.headers.get(orca.REQUEST_HEADER)
        return () if wanted is None else orca.response_headers(wanted, self.generator.mesh_load)


def check_model(name: object, served: str) -> None:
    """Raise :class:`errors.ModelNotFound` for a model other than the served one; None means the served one."""
    if name is None or name == served:
        return
    if not isinstance(name, str):
        raise errors.InvalidArgument("model must be a string", "model")
    raise errors.ModelNotFound(
        f"model {name[:128]!r} is not served; GET /v1/models lists the served models", field="model"
    )


def _trace_headers(exchange: Exchange) -> Headers:
    """Return the headers of the trace that the client has begun."""
    return pick_headers((name.decode("latin-1"), value) for name, value in exchange.headers.items())


async def _stream(exchange: Exchange, generation: Generation, answer: Answer, deltas: list[Delta]) -> None:
    """Write the body of a stream, from its first deltas on."""
    events = answer.first_events()

    direct = exchange.direct

    def write_now(delta: Delta) -> bool:
        """Write output without waking this task, if the connection can take it."""
        if direct is None or not direct.is_open:
            return False
        generation.count(delta)
        if events := answer.events(delta):
            direct.write(events)
        return True

    while True:
        events += b"".join(map(answer.events, deltas))
        if generation.done:
            await exchange.finish(events + answer.last_events() + sse.DONE)
            return
        if events:
            await exchange.write(events)
            events = b""
        deltas = await generation.take(write_now)


async def _whole(generation: Generation, answer: Answer) -> bytes:
    while not generation.done:
        for delta in await generation.take():
            answer.add(delta)
    return answer.body()
