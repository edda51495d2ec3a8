"""Runs ``/v1/responses``, in the foreground as any API that generates, or in the background."""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.host import Host

from ..encoding.sse import encode_json
from ..endpoints.generation_endpoint import GenerationEndpoint, ReadRequest
from ..generation.generator import Generator
from ..http.http_exchange import HttpExchange
from .mcp_rounds import McpGenerator
from .response_answer import McpRun, ResponseRequest, head_of, response_of
from .response_store import ResponseStore, StoredResponse
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
        held = [await self.endpoint.read(exchange)]
        request = held[0][1].request
        assert isinstance(request, ResponseRequest)
        if not request.is_background:
            run = request.mcp
            endpoint = self.endpoint if run is None else replace(self.endpoint, generator=self._rounds(run, held))
            await endpoint(exchange, held)
            return
        # A second run would take the request over from the first one, whose response would end as failed although its
        # client has that one's id.
        if (earlier := self.store.repeated(held[0][2], request.tenant)) is not None:
            await _respond(exchange, earlier.response)
            return
        response = response_of(head_of(request), "queued")
        stored = StoredResponse(request.tenant, response, request.turns, request.session, token=held[0][2])
        self.store.begin(stored)
        task = self.host.spawn(self._run(held, request, stored), name=f"response {request.response_id}")
        stored.cancel = task.cancel
        await exchange.respond(200, encode_json(response))

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with a stored response."""
        await _respond(exchange, self._stored(exchange).response)

    async def delete(self, exchange: HttpExchange) -> None:
        """Drop a stored response; end its generation."""
        response_id = _id_of(exchange)
        self.store.delete(response_id, exchange.tenant.name)
        await _respond(exchange, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, exchange: HttpExchange) -> None:
        """End the generation of a response in the background; do nothing if it has ended."""
        stored = self._stored(exchange)
        if stored.cancel is not None:
            stored.cancel()
            self.store.end(stored.response["id"], stored.response | {"status": "cancelled"})
            stored = self._stored(exchange)
        await _respond(exchange, stored.response)

    def _rounds(self, run: McpRun, held: list[ReadRequest]) -> McpGenerator:
        """Return what opens a response of several rounds. ``held``: what was read of its request."""
        read = partial(self.api.read_chat, tenant=held[0][0].tenant)
        return McpGenerator(self.generator, run, read, self.endpoint.parser)

    def _stored(self, exchange: HttpExchange) -> StoredResponse:
        return self.store.get(_id_of(exchange), exchange.tenant.name)

    async def _run(self, held: list[ReadRequest], request: ResponseRequest, stored: StoredResponse) -> None:
        """Generate a response in the background; store how it ended."""
        generator = self.generator if request.mcp is None else self._rounds(request.mcp, held)
        generate_request, options, token = held.pop()
        try:
            # No connection can be lost here: a client cancels or deletes the response, or the gateway ends.
            async with generator.open(generate_request, token=token, outlives_call=False) as generation:
                del generate_request
                stored.response = response_of(head_of(request), "in_progress")
                answer = self.api.answer(generation, options)
                while not generation.done:
                    for delta in await generation.take():
                        answer.add(delta)
                answer.complete()
        except asyncio.CancelledError:
            self.store.end(request.response_id, response_of(head_of(request), "cancelled"))
            raise
        except Exception as error:
            failure = _failure(wire_errors.of_exception(error))
            self.store.end(request.response_id, response_of(head_of(request), "failed", error=failure))


def _failure(error: errors.TokenloomError) -> dict[str, str]:
    """Return the error of a response in OpenAI's words: a limit and a wrong request are no faults of the server."""
    code = "server_error"
    if error.http_status == 429:
        code = "rate_limit_exceeded"
    elif 400 <= error.http_status < 500:
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


def _id_of(exchange: HttpExchange) -> str:
    return exchange.path.split("/")[3]


async def _respond(exchange: HttpExchange, answer: dict[str, Any]) -> None:
    await exchange.respond(200, encode_json(answer))
