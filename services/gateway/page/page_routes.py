"""Lists the routes of the page: its files, and what it shows as JSON."""

from collections.abc import Callable

from tokenloom.services.runtime.host.host import Host

from ..http.app import PAGE_FILES, Handler, Routes
from ..http.exchange import Exchange
from ..http.response_counts import ResponseCounts
from ..http.sse import encode_json
from ..served_mesh import ServedMesh
from .mesh_state import mesh_state
from .static_files import INDEX, static_files
from .traffic import Traffic


def page_routes(mesh: ServedMesh, host: Host, counts: ResponseCounts, root: Handler) -> Routes:
    """Return the routes by path. ``root``: answers clients other than browsers at ``/``."""
    traffic = Traffic(mesh.metrics, counts, mesh.view.load)
    host.spawn(traffic.run(), name="traffic of the last ten minutes")
    files = static_files()

    async def index(exchange: Exchange) -> None:
        wants_page = b"text/html" in exchange.headers.get(b"accept", b"")
        await (files[INDEX] if wants_page else root)(exchange)

    return {
        "/": {"GET": index},
        **{PAGE_FILES + name: {"GET": file} for name, file in files.items() if name != INDEX},
        "/mesh": {"GET": _json(lambda: mesh_state(mesh))},
        "/traffic": {"GET": _json(traffic.columns)},
    }


def _json(describe: Callable[[], object]) -> Handler:
    """Return a handler that answers with what ``describe`` returns; nothing keeps it."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, encode_json(describe()), headers=[(b"cache-control", b"no-store")])

    return handler
