"""Runs ``/v1/responses``, in the foreground as any API that generates, or in the background, and keeps the conversation
objects that responses belong to."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.host import Host

from ..encoding.sse import encode_json
from ..endpoints.generation_endpoint import GenerationEndpoint, ReadRequest
from ..files.page_query import PageQuery
from ..generation.generator import Generator
from ..http.http_exchange import HttpExchange
from ..http.request_body import decode_object
from .input_items import items_of, read_input
from .mcp_rounds import McpGenerator
from .response_answer import McpRun, ResponseRequest, head_of, response_of
from .response_store import CONVERSATION, ResponseStore, StoredResponse
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
        if (files := held[0][0].files) is not None:
            files.hold()  # the exchange lets go of them when it has answered
        task = self.host.spawn(self._run(held, request, stored), name=f"response {request.response_id}")
        stored.cancel = task.cancel
        await exchange.respond(200, encode_json(response))

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with a stored response."""
        await _respond(exchange, self._stored(exchange).response)

    async def delete(self, exchange: HttpExchange) -> None:
        """Drop a stored response; end its generation."""
        response_id = self._stored(exchange).response["id"]
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
        name = _id_of(exchange)
        if name.startswith(CONVERSATION):
            raise errors.NotFound(f"{name[:64]!r} is the id of a conversation")
        return self.store.get(name, exchange.tenant.name)

    async def _run(self, held: list[ReadRequest], request: ResponseRequest, stored: StoredResponse) -> None:
        """Generate a response in the background; store how it ended."""
        generator = self.generator if request.mcp is None else self._rounds(request.mcp, held)
        generate_request, options, token = held.pop()
        files = generate_request.files
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
            failure = _failure(wire_errors.of_exception(error), options.field_names)
            self.store.end(request.response_id, response_of(head_of(request), "failed", error=failure))
        finally:
            if files is not None:
                files.close()


MAX_ITEMS = 20
"""Items that one call adds to a conversation, as in OpenAI's API."""
MAX_BODY_BYTES = 1 << 20
"""Limits these items."""
_MAX_PAGE = 100
_INCLUDE = ("include", "include[]")
"""Asks for what only tools that run at OpenAI have; as it is and as OpenAI's clients write lists."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Keeps conversation objects: their items grow with each response that names them."""

    store: ResponseStore

    async def create(self, exchange: HttpExchange) -> None:
        """Begin a conversation. Raises ``InvalidArgument`` if the gateway keeps none."""
        if not self.store.is_on:
            raise errors.InvalidArgument("this gateway keeps no conversations (--max-stored-response-bytes is 0)")
        body = await self._body(exchange, "items", "metadata")
        now = int(time.time())
        head = {"id": f"{CONVERSATION}{uuid4().hex}", "object": "conversation", "created_at": now}
        conversation = head | {"metadata": _metadata(body) or {}}
        items = [] if body.get("items") in (None, []) else _items(body)
        self.store.put(StoredResponse(exchange.tenant.name, conversation, items))
        await _respond(exchange, conversation)

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with a conversation, without its items."""
        await _respond(exchange, self._stored(exchange).response)

    async def update(self, exchange: HttpExchange) -> None:
        """Give a conversation other metadata."""
        metadata = _metadata(await self._body(exchange, "metadata")) or {}
        stored = self._stored(exchange)
        conversation = stored.response | {"metadata": metadata}
        self.store.put(replace(stored, response=conversation))
        await _respond(exchange, conversation)

    async def delete(self, exchange: HttpExchange) -> None:
        """Forget a conversation and its items."""
        name = self._stored(exchange).response["id"]
        self.store.delete(name, exchange.tenant.name)
        await _respond(exchange, {"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, exchange: HttpExchange) -> None:
        """Answer with the items of a conversation."""
        names = ("after", "limit", "order", *_INCLUDE)
        query = PageQuery.read(exchange.query, most=_MAX_PAGE, default=20, names=names)
        await _respond(exchange, query.page(list(self._stored(exchange).turns)))

    async def add(self, exchange: HttpExchange) -> None:
        """Add items to a conversation."""
        items = _items(await self._body(exchange, "items"))
        name = self._stored(exchange).response["id"]
        self.store.append(name, exchange.tenant.name, items)
        page = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        await _respond(exchange, {"object": "list", "data": items, **page})

    async def item(self, exchange: HttpExchange) -> None:
        """Answer with an item of a conversation. Raises ``NotFound``."""
        turns = self._stored(exchange).turns
        await _respond(exchange, turns[_place_of_item(exchange, turns)])

    async def delete_item(self, exchange: HttpExchange) -> None:
        """Leave an item out of a conversation from now on; answer with the conversation. Raises ``NotFound``."""
        stored = self._stored(exchange)
        at = _place_of_item(exchange, stored.turns)
        self.store.put(replace(stored, turns=[*stored.turns[:at], *stored.turns[at + 1 :]]))
        await _respond(exchange, stored.response)

    def _stored(self, exchange: HttpExchange) -> StoredResponse:
        name = _id_of(exchange)
        if not name.startswith(CONVERSATION):
            raise errors.NotFound(f"{name[:64]!r} is not the id of a conversation")
        return self.store.get(name, exchange.tenant.name)

    async def _body(self, exchange: HttpExchange, *fields: str) -> dict[str, Any]:
        """Return the body, which may have these fields."""
        with await exchange.read_body(MAX_BODY_BYTES) as received:
            body = decode_object(received.data) if received.data else {}
        if unknown := body.keys() - {*fields}:
            name = str(min(unknown))[:64]
            raise errors.InvalidArgument(f"{name}: unknown field", name)
        return body


def _items(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a body, which a response could have as its input."""
    items = body.get("items")
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise errors.InvalidArgument(f"items must be a list of 1 to {MAX_ITEMS} items", "items")
    try:
        read_input(items)
    except errors.InvalidArgument as error:
        raise error.renamed({"input": "items"}) from None
    return items_of(items)


def _metadata(body: Mapping[str, Any]) -> dict[str, Any] | None:
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise errors.InvalidArgument("metadata must be an object", "metadata")
    return metadata


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


def _id_of(exchange: HttpExchange) -> str:
    return exchange.path.split("/")[3]


def _place_of_item(exchange: HttpExchange, items: Sequence[Mapping[str, Any]]) -> int:
    """Return which item of a conversation a path names."""
    name = exchange.path.split("/")[5]
    place = next((at for at, item in enumerate(items) if item["id"] == name), None)
    if place is None:
        raise errors.NotFound(f"the conversation has no item {name[:64]!r}")
    return place


async def _respond(exchange: HttpExchange, answer: dict[str, Any]) -> None:
    await exchange.respond(200, encode_json(answer))
