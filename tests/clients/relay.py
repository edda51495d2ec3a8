"""A relay between a client and a gateway that keeps each request's body and the usage of its answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from tests.plain_text import PLAIN_TEXT

_OF_CONNECTION = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"accept-encoding"}


@dataclass(frozen=True)
class Exchange:
    """A request of a client, with what the mesh counted.

    Attributes:
        usage: As the API writes it; empty: the answer had none.
        volatile: The lines that the gateway took out or moved.
    """

    path: str
    agent: str
    body: dict[str, Any]
    status: int
    usage: dict[str, Any]
    volatile: str

    @property
    def prompt_tokens(self) -> int:
        if (tokens := self.usage.get("prompt_tokens")) is not None:
            return int(tokens)
        beside = () if self._details else ("cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(self.usage.get(part, 0) for part in ("input_tokens", *beside))

    @property
    def cached_tokens(self) -> int:
        return int((self._details or {"cached_tokens": self.usage.get("cache_read_input_tokens", 0)})["cached_tokens"])

    @property
    def miss(self) -> dict[str, Any]:
        """Why the prompt did not find what an earlier one had left; empty: it did."""
        return (self._details or self.usage).get("cache_miss") or {}

    @property
    def _details(self) -> dict[str, Any]:
        return self.usage.get("prompt_tokens_details") or self.usage.get("input_tokens_details") or {}


def usage_of(answer: str) -> dict[str, Any]:
    """Return the usage of an answer or of a stream of events: later values win."""
    usage: dict[str, Any] = {}
    decoder = json.JSONDecoder()
    pieces = answer.split('"usage":')
    for piece in pieces[1:]:
        found, _ = decoder.raw_decode(piece.lstrip())
        usage |= found or {}
    return usage


@dataclass
class Relay:
    """An ASGI application."""

    target: httpx.AsyncClient
    exchanges: list[Exchange] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        request = self.target.build_request(
            scope["method"], path, content=body, headers=_forwarded(scope["headers"], (b"accept-encoding", b"identity"))
        )
        response = await self.target.send(request, stream=True)
        answer = b""
        try:
            head = {"status": response.status_code, "headers": _forwarded(response.headers.raw)}
            await send({"type": "http.response.start", **head})
            async for piece in response.aiter_raw():
                answer += piece
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            await response.aclose()
        self._keep(request, response, body, answer.decode(errors="replace"))

    def _keep(self, request: httpx.Request, response: httpx.Response, body: bytes, answer: str) -> None:
        agent, volatile = request.headers.get("user-agent", ""), response.headers.get("x-tokenloom-volatile", "")
        asked = json.loads(body) if body else {}
        kept = Exchange(request.url.path, agent, asked, response.status_code, usage_of(answer), volatile)
        self.exchanges.append(kept)


def _forwarded(headers: Iterable[tuple[bytes, bytes]], *added: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _OF_CONNECTION] + list(added)


@asynccontextmanager
async def relaying(target: str) -> AsyncIterator[tuple[Relay, str]]:
    """Serve at a free port; gives the relay and its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with httpx.AsyncClient(base_url=target, timeout=300, verify=PLAIN_TEXT) as client:
        relay = Relay(client)
        server = uvicorn.Server(uvicorn.Config(relay, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server._serve([listener]), name="relay")
        try:
            yield relay, "http://{}:{}".format(*listener.getsockname())
        finally:
            server.should_exit = True
            await task
