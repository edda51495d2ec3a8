"""An endpoint that generates: reads a body, runs the request and writes JSON or a stream of events."""

import logging
from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers, pick_headers

from ..generation.generation import Generation, Generator
from ..generation.job import Job
from ..mesh.collector import Delta
from ..openai.chat import ChatAnswer, ChatApi
from ..openai.completions import CompletionAnswer, CompletionsApi
from ..openai.openai_models import Body, Options
from . import orca, sse
from .exchange import Exchange
from .exchange import Headers as HeaderPairs
from .json_body import BodyParser

log = logging.getLogger(__name__)

Api = ChatApi | CompletionsApi
Answer = ChatAnswer | CompletionAnswer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Runs one of OpenAI's APIs."""

    api: Api
    generator: Generator
    model: str
    parser: BodyParser
    max_body_bytes: int

    async def __call__(self, exchange: Exchange) -> None:
        jobs = [await self._read(exchange)]  # a list: this frame must not keep the prompts while the model generates
        options = jobs[0][1]
        headers = _trace_headers(exchange) if b"traceparent" in exchange.headers else NO_HEADERS
        with exchange.until_disconnected():
            async with self.generator.open(jobs.pop()[0], headers) as generation:
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

    async def _read(self, exchange: Exchange) -> tuple[Job, Options]:
        """Return what the body asks for."""
        return await self.parser.read(await exchange.read_body(self.max_body_bytes), self._job)

    def _job(self, body: Body) -> tuple[Job, Options]:
        check_model(body.get("model"), self.model)
        return self.api.read(body)

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
