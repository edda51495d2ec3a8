"""Keeps the conversation objects of OpenAI's Responses API, to which responses belong."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from tokenloom.request import errors

from ..encoding.sse import encode_json
from ..files.page_query import PageQuery
from ..http.http_exchange import HttpExchange
from ..http.request_body import decode_object
from .input_items import items_of, read_input
from .response_store import CONVERSATION, ResponseStore, StoredResponse

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
        await respond(exchange, conversation)

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with a conversation, without its items."""
        await respond(exchange, self._stored(exchange).response)

    async def update(self, exchange: HttpExchange) -> None:
        """Give a conversation other metadata."""
        metadata = _metadata(await self._body(exchange, "metadata")) or {}
        stored = self._stored(exchange)
        conversation = stored.response | {"metadata": metadata}
        self.store.put(replace(stored, response=conversation))
        await respond(exchange, conversation)

    async def delete(self, exchange: HttpExchange) -> None:
        """Forget a conversation and its items."""
        name = self._stored(exchange).response["id"]
        self.store.delete(name, exchange.tenant.name)
        await respond(exchange, {"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, exchange: HttpExchange) -> None:
        """Answer with the items of a conversation."""
        names = ("after", "limit", "order", *_INCLUDE)
        query = PageQuery.read(exchange.query, most=_MAX_PAGE, default=20, names=names)
        await respond(exchange, query.page(list(self._stored(exchange).turns)))

    async def add(self, exchange: HttpExchange) -> None:
        """Add items to a conversation."""
        items = _items(await self._body(exchange, "items"))
        name = self._stored(exchange).response["id"]
        self.store.append(name, exchange.tenant.name, items)
        page = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        await respond(exchange, {"object": "list", "data": items, **page})

    async def item(self, exchange: HttpExchange) -> None:
        """Answer with an item of a conversation. Raises ``NotFound``."""
        turns = self._stored(exchange).turns
        await respond(exchange, turns[_place_of_item(exchange, turns)])

    async def delete_item(self, exchange: HttpExchange) -> None:
        """Leave an item out of a conversation from now on; answer with the conversation. Raises ``NotFound``."""
        stored = self._stored(exchange)
        at = _place_of_item(exchange, stored.turns)
        self.store.put(replace(stored, turns=[*stored.turns[:at], *stored.turns[at + 1 :]]))
        await respond(exchange, stored.response)

    def _stored(self, exchange: HttpExchange) -> StoredResponse:
        name = id_of(exchange)
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


def id_of(exchange: HttpExchange) -> str:
    """Return the id of the response or conversation that a path names."""
    return exchange.path.split("/")[3]


def _place_of_item(exchange: HttpExchange, items: Sequence[Mapping[str, Any]]) -> int:
    """Return which item of a conversation a path names."""
    name = exchange.path.split("/")[5]
    place = next((at for at, item in enumerate(items) if item["id"] == name), None)
    if place is None:
        raise errors.NotFound(f"the conversation has no item {name[:64]!r}")
    return place


async def respond(exchange: HttpExchange, answer: dict[str, Any]) -> None:
    """Answer with an object."""
    await exchange.respond(200, encode_json(answer))
