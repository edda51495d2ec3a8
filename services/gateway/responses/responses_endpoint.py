"""Runs ``/v1/responses``, in the foreground as any API that generates, or in the background."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import parse_qs

import msgspec

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1.output_processor_pb2 import RecallResponse

from ..encoding import sse
from ..encoding.sse import encode_json
from ..endpoints.generation_endpoint import REPEAT_SECONDS, GenerationEndpoint, ReadRequest, hold_answer, shaped_again
from ..generation.delivered import TextPieces
from ..generation.generator import Generator
from ..generation.running_generation import RunningGeneration
from ..http.http_exchange import HttpExchange
from ..mesh.process_stream import UNKNOWN_MARK
from ..openai.body_reader import AnswerOptions
from ..records.request_ids import NEW, ResumeToken, fingerprint, is_request_id
from ..tenants.tenant import Tenant
from .conversations import id_of, respond
from .mcp_rounds import McpGenerator
from .output_items import Events
from .response_answer import McpRun, Recipe, ResponseAnswer, ResponseRequest, head_of, response_of
from .response_store import CONVERSATION, EventLog, ResponseStore, StoredResponse
from .responses import ResponsesApi


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint:
    """Answers with a response, or with one that a client asks for later."""

    endpoint: GenerationEndpoint
    api: ResponsesApi
    generator: Generator
    store: ResponseStore
    host: Host
    """Owns what runs in the background."""

    async def __call__(self, exchange: HttpExchange) -> None:
        held = [await self._read(exchange)]
        request = held[0][1].request
        assert isinstance(request, ResponseRequest)
        if not request.is_background:
            run, endpoint = request.mcp, self.endpoint
            if run is not None:
                held = [_let_go(exchange, held.pop())]  # its tools may have effects
                endpoint = replace(endpoint, generator=self._rounds(run, held))
            elif held[0][2].fingerprint:
                is_kept = request.recipe is not None and held[0][2].is_held
                held = [await self._claimed(exchange, held.pop(), request.recipe) if is_kept else self._named(held[0])]
            await endpoint(exchange, held)
            return
        del request  # the client's body must not live as long as a stream
        stored = await self._in_background(exchange, held)
        if stored.log is not None:
            await _follow(exchange, stored.log, 0)
        else:
            await respond(exchange, stored.response)

    async def _read(self, exchange: HttpExchange) -> ReadRequest:
        """Return what the body asks for. What it continues may be stored at the gateway alone that was killed."""
        if exchange.hold is None:
            return await self.endpoint.read(exchange)
        endpoint = replace(self.endpoint, api=replace(self.api, is_held=True))
        try:
            return await endpoint.read(exchange, is_plain=True)
        except errors.NotFound:
            past = exchange.past
            if past is None or not past.request_id:
                raise
            recalled = await self.generator.recall(past.request_id, exchange.tenant.name)
            if not recalled.recipe:
                raise
        recipe = await self.endpoint.parser.run(partial(msgspec.json.decode, recalled.recipe, type=Recipe))
        request, options, _ = await self._read_recipe(recipe, recalled, exchange.tenant, past.request_id)
        options, token = hold_answer(exchange, exchange.body.data, request, options)
        exchange.body.close()
        return request, options, replace(token, recipe=recalled.recipe)

    async def _in_background(self, exchange: HttpExchange, held: list[ReadRequest]) -> StoredResponse:
        """Begin a response in the background, unless an earlier call, or another gateway whose client is now this
        one's, has begun it. ``held``: what was read of its request; it is emptied."""
        request, token = held[0][1].request, held[0][2]
        assert isinstance(request, ResponseRequest)
        tenant, recipe = request.tenant, request.recipe
        if token.is_held:  # the connection is, and the response goes on without it
            if (begun := await self._begun_elsewhere(exchange, token.request_id)) is not None:
                return begun
            token = ResumeToken(token.request_id, token.fingerprint)
            held[:] = [(*held[0][:2], token)]
        # A second run would take the request over from the first one, whose response would end as failed although its
        # client has that one's id.
        stored = self.store.repeated(token, tenant)
        if stored is None and recipe is not None:
            held[:] = [await self._claimed(exchange, held.pop(), recipe)]
            stored = self.store.repeated(token, tenant)  # meanwhile another call with this key may have begun it
        if exchange.held is not None and held[0][2].recipe:
            exchange.held.name(held[0][2].request_id, [])  # before it begins: no second one is begun elsewhere
        else:  # also where it is not held: its body is gone, and no other gateway could begin or continue it
            held[:] = [_let_go(exchange, held.pop())]
        stored = stored or self._begin(held)
        with exchange.until_disconnected():
            await self._until_kept(stored)
        return stored

    async def _until_kept(self, stored: StoredResponse) -> None:
        """Wait until an output processor has the request of a response that other gateways can continue, or until it
        has ended: with its id, a client fetches it from any of them although this one is killed."""
        if stored.withdraw is None or stored.task is None:
            return
        asked = asyncio.ensure_future(self.generator.until_kept(stored.token.request_id, stored.tenant))
        try:
            await asyncio.wait({asked, stored.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    async def _begun_elsewhere(self, exchange: HttpExchange, request_id: str) -> StoredResponse | None:
        """Return the response that another gateway has begun on this connection; None: it has begun none. Raises
        ``NotFound`` if the client has a part of one that cannot be continued."""
        if not request_id:
            return None
        try:
            return await self._found(_PREFIX + request_id, exchange.tenant)
        except errors.NotFound:
            if exchange.started:
                raise
            return None

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with a stored response, or with its events after the one that the client names."""
        first = _first_event(exchange.query)
        stored = await self._found(id_of(exchange), exchange.tenant, takes_over=first is not None)
        if first is None:
            await respond(exchange, stored.response)
            return
        if stored.log is None:
            raise errors.InvalidArgument("the response was not begun with background and stream", "stream")
        await _follow(exchange, stored.log, first)

    async def delete(self, exchange: HttpExchange) -> None:
        """Drop a stored response; end its generation."""
        stored = await self._found(id_of(exchange), exchange.tenant)
        response_id = stored.response["id"]
        self.store.delete(response_id, exchange.tenant.name)
        if stored.withdraw is not None:  # an output processor may keep it after its end
            stored.withdraw()
        await respond(exchange, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, exchange: HttpExchange) -> None:
        """End the generation of a response in the background; do nothing if it has ended."""
        stored = await self._found(id_of(exchange), exchange.tenant)
        if stored.task is not None:
            stored.task.cancel()
            self.store.end(stored.response["id"], stored.response | {"status": "cancelled"})
            if stored.withdraw is not None:
                stored.withdraw()  # the task may not have begun
            if stored.log is not None:
                stored.log.end()
            stored = self._stored(id_of(exchange), exchange.tenant)
        await respond(exchange, stored.response)

    def _rounds(self, run: McpRun, held: list[ReadRequest]) -> McpGenerator:
        """Return what opens a response of several rounds. ``held``: what was read of its request."""
        read = partial(self.api.read_chat, tenant=held[0][0].tenant)
        return McpGenerator(self.generator, run, read, self.endpoint.parser)

    def _stored(self, name: str, tenant: Tenant) -> StoredResponse:
        if name.startswith(CONVERSATION):
            raise errors.NotFound(f"{name[:64]!r} is the id of a conversation")
        return self.store.get(name, tenant.name)

    def _named(self, read: ReadRequest) -> ReadRequest:
        """Give a response the id of its request, by which any gateway finds it again."""
        _, options, token = read
        response, numbered = options.request, options.numbered
        assert isinstance(response, ResponseRequest)
        token = replace(token, request_id=token.request_id or self.generator.draw_id() + UNKNOWN_MARK)
        created = options.created or (response.created if numbered is None else numbered.created)
        return _renamed((*read[:2], token), _PREFIX + token.request_id, created)

    async def _claimed(self, exchange: HttpExchange, read: ReadRequest, recipe: Recipe | None) -> ReadRequest:
        """Return a response with what any gateway needs to continue it, unless that is too large."""
        assert recipe is not None
        request, options, token = self._named(read)
        assert isinstance(options.request, ResponseRequest)
        recipe.created = options.request.created
        name = options.request.response_id
        if self.store.knows(name, request.tenant.name):  # an earlier call with this key was cancelled, or has failed
            name = f"{name}_{self.generator.draw_id()[:8]}"
        recipe.session, recipe.rank, recipe.response_id = request.session, request.data_parallel_rank, name
        data = await self.endpoint.parser.run(partial(_encoded, recipe))
        if not data and token.is_held:
            return request, options, token
        if not data:
            assert isinstance(read[1].request, ResponseRequest)
            return _renamed(read, read[1].request.response_id, recipe.created)
        token = replace(token, fingerprint=token.fingerprint or fingerprint(exchange.path, data), recipe=data)
        return _renamed((request, options, token), name, recipe.created)

    def _begin(self, held: list[ReadRequest]) -> StoredResponse:
        """Begin a response in the background. Raises ``ResourceExhausted``. ``held``: what was read of its request."""
        generate_request, options, token = held[0]
        request = options.request
        assert isinstance(request, ResponseRequest)
        response = response_of(head_of(request), "in_progress" if token.resumes else "queued")
        log = EventLog() if options.stream else None
        known_by = replace(token, recipe=b"")  # which may be large, and is not needed here
        stored = StoredResponse(request.tenant, response, request.turns, request.session, token=known_by, log=log)
        self.store.begin(stored)
        if generate_request.files is not None:
            generate_request.files.hold()  # the exchange lets go of them when it has answered
        stored.task = self.host.spawn(self._run(held, request, stored), name=f"response {request.response_id}")
        if token.fingerprint:
            stored.withdraw = partial(self.generator.cancel, token.request_id, request.tenant)
        return stored

    async def _found(self, name: str, tenant: Tenant, *, takes_over: bool = True) -> StoredResponse:
        """Return a response that is stored here, or one in the background that another gateway began, which this one
        continues. Raises ``NotFound``; ``Unavailable`` for one that this gateway cannot continue.

        ``takes_over``: also take it from a gateway that runs it; False: say only that it is in progress there.
        """
        try:
            return self._stored(name, tenant)
        except errors.NotFound as error:
            unknown = error
        request_id = _request_id_of(name)
        if request_id is None or not self.store.is_on or self.store.was_deleted(name, tenant.name):
            raise unknown
        try:
            recalled = await self.generator.recall(request_id, tenant.name)
        except errors.RequestLost:
            raise unknown from None
        if not recalled.recipe:
            raise unknown
        try:
            recipe = await self.endpoint.parser.run(partial(msgspec.json.decode, recalled.recipe, type=Recipe))
            if recipe.response_id != name:
                raise unknown
            held = [await self._read_recipe(recipe, recalled, tenant, request_id)]
        except (msgspec.MsgspecError, errors.InvalidArgument, errors.ModelNotFound) as error:
            # The request was right where it began. Another gateway may continue it.
            message = "This gateway cannot continue the response, which one of another release may have begun; retry."
            raise errors.Unavailable(message) from error
        with suppress(errors.NotFound):  # another call may have begun it meanwhile
            return self._stored(name, tenant)
        if self.store.was_deleted(name, tenant.name):
            raise unknown
        if recalled.is_attended and not takes_over:
            request = held[0][1].request
            assert isinstance(request, ResponseRequest)
            return StoredResponse(tenant.name, response_of(head_of(request), "in_progress"), ())
        return self._begin(held)

    async def _read_recipe(
        self, recipe: Recipe, recalled: RecallResponse, tenant: Tenant, request_id: str
    ) -> ReadRequest:
        """Return what the client asked another gateway for."""
        endpoint = replace(self.endpoint, api=self.api.reading(recipe, tenant.name))
        # The lines that its client changes were taken out before the recipe was made.
        read = partial(endpoint.read_fields, tenant, None, recipe.body)
        request, options = await self.endpoint.parser.run(read)
        request = replace(request, session=recipe.session, data_parallel_rank=recipe.rank)
        token = ResumeToken(
            request_id,
            recalled.fingerprint,
            resumes=True,
            num_delivered=(recalled.num_counted,),
            recipe=recalled.recipe,
        )
        return _renamed((request, options, token), recipe.response_id, recipe.created)

    async def _run(self, held: list[ReadRequest], request: ResponseRequest, stored: StoredResponse) -> None:
        """Generate a response in the background; store how it ended."""
        generator = self.generator if request.mcp is None else self._rounds(request.mcp, held)
        generate_request, options, token = held.pop()
        files, log = generate_request.files, stored.log
        answer: ResponseAnswer | None = None
        lost: errors.TokenloomError | None = None
        try:
            # No connection can be lost here: a client cancels or deletes the response, or the gateway ends.
            async with generator.open(generate_request, token=token, outlives_call=False) as generation:
                del generate_request
                stored.response = response_of(head_of(request), "in_progress")
                answer = self.api.answer(generation, shaped_again(options, generation.request_id))
                await (_collect(generation, answer) if log is None else _stream(generation, answer, log, request))
        except asyncio.CancelledError:
            self.store.end(request.response_id, response_of(head_of(request), "cancelled"))
            raise
        except Exception as error:
            failure = wire_errors.of_exception(error)
            if _is_elsewhere(failure, token, has_begun=answer is not None):
                self.store.forget(request.response_id)
                lost = failure
            else:
                self._fail(request, options, failure, log, answer)
        finally:
            if log is not None:
                log.end(lost)
                self.store.recount(request.response_id, request.tenant)
            if files is not None:
                files.close()

    def _fail(
        self,
        request: ResponseRequest,
        options: AnswerOptions,
        error: errors.TokenloomError,
        log: EventLog | None,
        answer: ResponseAnswer | None,
    ) -> None:
        """Store that a response has failed. ``answer``: what has shaped it; None: it has not begun."""
        head = head_of(request)
        response = response_of(head, "failed", error=_failure(error, options.field_names))
        self.store.end(request.response_id, response)
        if log is None:
            return
        if answer is not None:
            log.add(answer.failed_event(response))
        else:
            event = Events().event
            log.add(event("response.created", response=response_of(head, "queued")))
            log.add(event("response.failed", response=response))


MAX_RECIPE_BYTES = 1 << 20
"""A response in the background whose request is larger ends with its gateway: output processors keep as much for each
of the others."""
PIECES_PER_TURN = 64
"""Events that are made before the event loop serves other work: a response that goes on here comes in one delta."""
_PREFIX = "resp_"


def _let_go(exchange: HttpExchange, read: ReadRequest) -> ReadRequest:
    """Let a response end with this gateway, if that is killed. Raises ``RequestLost`` if it is one of another gateway
    that has begun."""
    if exchange.past is not None and exchange.past.has_begun:
        raise errors.RequestLost("This gateway cannot continue the response; send the request again.")
    if exchange.let_go is not None:
        exchange.let_go()
        exchange.held = None
    return (*read[:2], NEW) if read[2].is_held else read


def _request_id_of(response_id: str) -> str | None:
    """Return the id of the request that generates a response; None if no other gateway could continue it."""
    request_id = response_id.removeprefix(_PREFIX).partition("_")[0]
    return request_id if is_request_id(request_id) else None


def _renamed(read: ReadRequest, response_id: str, created: int) -> ReadRequest:
    """Return a request whose response has this id and this time."""
    request, options, token = read
    assert isinstance(options.request, ResponseRequest)
    response = replace(options.request, response_id=response_id, created=created, recipe=None)
    return replace(request, answer=response_id), replace(options, request=response), token


def _encoded(recipe: Recipe) -> bytes:
    """Return a recipe in JSON; empty if it is too large, or has what JSON cannot hold."""
    try:
        data = encode_json(recipe)
    except (ValueError, OverflowError):
        return b""
    return data if len(data) <= MAX_RECIPE_BYTES else b""


def _is_elsewhere(error: errors.TokenloomError, token: ResumeToken, *, has_begun: bool) -> bool:
    """Return whether a response ends here and not in the mesh: another gateway has taken it over or is to do so, or
    this one could not take it over now."""
    if isinstance(error, (errors.Aborted, errors.GatewayLeaving, errors.RequestLost)):
        return True
    return token.resumes and not has_begun


async def _collect(generation: RunningGeneration, answer: ResponseAnswer) -> None:
    while not generation.done:
        for delta in await generation.take():
            answer.add(delta)
    answer.complete()


async def _stream(
    generation: RunningGeneration, answer: ResponseAnswer, log: EventLog, request: ResponseRequest
) -> None:
    """Add the events of a response to its log. Those of one that another gateway may continue depend on the text alone,
    so that they have the same numbers there."""
    pieces, num_made = TextPieces() if request.mcp is None else None, 0
    log.add(answer.first_events())
    while not generation.done:
        for delta in await generation.take():
            for piece in (delta,) if pieces is None else pieces.cut(delta):
                log.add(answer.events(piece))
                num_made += 1
                if num_made % PIECES_PER_TURN == 0:
                    await asyncio.sleep(0)
    log.add(answer.last_events())


async def _follow(exchange: HttpExchange, log: EventLog, first: int) -> None:
    """Write the events of a response from a number on, and those that are still to come. Raises why the log ended if
    the response did not."""
    if (past := exchange.past) is not None:
        first = max(first, past.number)
    elif exchange.held is None and exchange.hold is not None:
        exchange.held = exchange.hold(b"")  # of a call that reads the events: it has no body
    with exchange.until_disconnected():
        if not exchange.started:
            await exchange.start(200, sse.HEADERS)
        while True:
            if events := log.read(first):
                first += len(events)
                for piece in events if exchange.held is not None else (b"".join(events),):  # what is held is small
                    await exchange.write(piece)
                continue
            if log.is_over:
                break
            try:
                async with asyncio.timeout(REPEAT_SECONDS):
                    await log.more()
            except TimeoutError:
                await exchange.write(sse.KEEP_ALIVE)
        if log.error is not None:
            raise log.error
        await exchange.finish()


def _first_event(query: bytes) -> int | None:
    """Return the number of the first event that a client wants; None: it wants the response. Raises
    ``InvalidArgument``."""
    try:
        values = {name: given[-1] for name, given in parse_qs(query.decode("ascii"), max_num_fields=16).items()}
    except ValueError:
        raise errors.InvalidArgument("the query string is not valid") from None
    stream, after = values.get("stream", "false").lower(), values.get("starting_after")
    if stream not in ("true", "false"):
        raise errors.InvalidArgument("stream must be true or false", "stream")
    if after is None:
        return 0 if stream == "true" else None
    if stream != "true":
        raise errors.InvalidArgument("starting_after needs stream=true", "starting_after")
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise errors.InvalidArgument("starting_after must be the sequence_number of an event", "starting_after")
    return int(after) + 1


def _failure(error: errors.TokenloomError, names: Mapping[str, str]) -> dict[str, str]:
    """Return the error of a response in OpenAI's words: a limit and a wrong request are no faults of the server.

    ``names``: what the client calls a field, by our name.
    """
    code = "server_error"
    if isinstance(error, errors.InvalidArgument):
        error = error.renamed(names)
    if error.http_status == 429:
        code = "rate_limit_exceeded"
    elif isinstance(error, errors.ContextLengthExceeded):
        code = error.reason.lower()  # agents shorten the conversation on this code alone
    elif 400 <= error.http_status < 500:
        code = "invalid_prompt"
    return {"code": code, "message": error.message}
