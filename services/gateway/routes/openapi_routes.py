"""Serves ``/openapi.json`` and the page that shows it."""

from collections.abc import Callable
from functools import cache
from importlib import resources

from tokenloom.v1 import types_pb2

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.route import Routes
from ..openapi import route_table
from ..openapi.document import document


@cache
def _document(*, admin: bool, embeds: bool, batches: bool) -> bytes:
    return encode_json(document(admin=admin, embeds=embeds, batches=batches))


@cache
def _page() -> bytes:
    return resources.files(__package__).joinpath("openapi.html").read_bytes()


async def _docs(exchange: HttpExchange) -> None:
    # The page runs only its own script and connects only to its own server.
    policy = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    headers = [(b"content-security-policy", policy)]
    await exchange.respond(200, _page(), b"text/html; charset=utf-8", headers)


def document_routes(limits_of: Callable[[], types_pb2.ModelLimits | None], *, admin: bool, batches: bool) -> Routes:
    """Return the routes of the document. ``limits_of``: returns those of the served model, if they are known.
    ``admin``: the gateway has admin routes; ``batches``: it has files and batches."""

    async def openapi(exchange: HttpExchange) -> None:
        limits = limits_of()
        embeds = limits is not None and limits.hidden_size > 0
        await exchange.respond(200, _document(admin=admin, embeds=embeds, batches=batches))

    return {route_table.DOCUMENT: openapi, route_table.DOCUMENT_PAGE: _docs}
