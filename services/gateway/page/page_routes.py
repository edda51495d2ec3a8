"""Lists the routes of the page: its files, and what it shows as JSON."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from urllib.parse import parse_qs

from tokenloom.services.runtime.host.host import Host

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.response_counts import ResponseCounts
from ..http.route import Handler, Route, Routes
from ..openapi import route_table
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from .mesh_state import mesh_state
from .traffic import Traffics

PAGE_FILES = "/page/"
"""The paths of the page's files begin with it; the files hold nothing of the mesh."""
INDEX = "index.html"
_TYPES: Mapping[str, bytes] = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# The page runs only its own files and connects only to its own gateway; no other page may show it in a frame.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"cache-control", b"no-cache"),  # keep it, and ask whether it has changed
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """Holds one file and answers requests for it.

    Attributes:
        etag: The digest of the content, in quotation marks, as HTTP writes it.
    """

    content: bytes
    content_type: bytes
    etag: bytes

    async def __call__(self, exchange: HttpExchange) -> None:
        """Send the file, or 304 without it if the browser has this content already."""
        headers = (*_HEADERS, (b"etag", self.etag))
        if self.etag in exchange.headers.get(b"if-none-match", b""):
            await exchange.start(304, headers)
            await exchange.finish()
        else:
            await exchange.respond(200, self.content, self.content_type, headers)


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the files of the page, by path."""
    return {path: _file(path, each.read_bytes()) for path, each in _walk(resources.files(__package__) / "static")}


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _walk(each, f"{prefix}{each.name}/")
        else:
            yield prefix + each.name, each


def _file(name: str, content: bytes) -> StaticFile:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return StaticFile(content, _TYPES[name.rpartition(".")[2]], f'"{digest}"'.encode())


def page_routes(meshes: ServedMeshes, host: Host, counts: ResponseCounts, root: Handler) -> Routes:
    """Return the routes. ``root``: answers clients other than browsers at ``/``."""
    traffics = Traffics(meshes, counts)
    host.spawn(traffics.run(), name="traffic of the last ten minutes")
    files = static_files()

    async def index(exchange: HttpExchange) -> None:
        wants_page = b"text/html" in exchange.headers.get(b"accept", b"")
        await (files[INDEX] if wants_page else root)(exchange)

    return {
        route_table.ROOT: index,
        **{Route("GET", PAGE_FILES + name, is_open=True): file for name, file in files.items() if name != INDEX},
        route_table.MESH: _json(meshes, lambda mesh: {"models": list(meshes.states()), **mesh_state(mesh)}),
        route_table.TRAFFIC: _json(meshes, lambda mesh: traffics.of(mesh).columns()),
    }


def _json(meshes: ServedMeshes, describe: Callable[[ServedMesh], object]) -> Handler:
    """Return a handler that describes the mesh of the model that the query names, the first one by default. Browsers
    do not keep the answer."""

    async def handler(exchange: HttpExchange) -> None:
        names = parse_qs(exchange.query.decode("latin-1")).get("model")
        mesh = meshes.pick(names[-1]) if names else meshes.first
        await exchange.respond(200, encode_json(describe(mesh)), headers=[(b"cache-control", b"no-store")])

    return handler
