"""Lists the routes of the page: its files, and what it shows as JSON."""

from collections.abc import Callable
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
from .static_files import INDEX, static_files
from .traffic import Traffics

PAGE_FILES = "/page/"
"""The paths of the page's files begin with it; the files hold nothing of the mesh."""


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
