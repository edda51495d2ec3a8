"""``/openapi.json`` and the page that shows it."""

from collections.abc import Mapping
from functools import cache
from importlib import resources

from ..app import Handler
from ..exchange import Exchange
from ..sse import encode_json
from .document import document


@cache
def _document() -> bytes:
    return encode_json(document())


@cache
def _page() -> bytes:
    return resources.files(__package__).joinpath("page.html").read_bytes()


async def _openapi(exchange: Exchange) -> None:
    await exchange.respond(200, _document())


async def _docs(exchange: Exchange) -> None:
    # The page runs its own script and asks its own server, nobody else.
    policy = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    headers = [(b"content-security-policy", policy)]
    await exchange.respond(200, _page(), b"text/html; charset=utf-8", headers)


DOCUMENT_ROUTES: Mapping[str, Mapping[str, Handler]] = {
    "/openapi.json": {"GET": _openapi},
    "/docs": {"GET": _docs},
}
