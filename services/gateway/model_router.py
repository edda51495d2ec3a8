"""Gives each request of the HTTP API to the routes of the mesh that serves its model."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tokenloom.request import errors

from .http.http_exchange import HttpExchange
from .http.request_body import OFF_LOOP_BYTES
from .http.route import Handler, Route, Routes
from .openapi import route_table
from .serving.served_mesh import ServedMesh
from .serving.served_meshes import ServedMeshes

if TYPE_CHECKING:
    from .http.body_files import BodyFiles


class _Model(msgspec.Struct):
    """The field of a body that names the model; the others are skipped."""

    model: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class _Found:
    """Holds what a body names as its model; None: nothing."""

    name: object


_model = msgspec.json.Decoder(_Model)
_OF_A_RESPONSE = (route_table.RESPONSE, route_table.DELETE_RESPONSE, route_table.CANCEL_RESPONSE)


class ModelRouter:
    """Holds the routes of each mesh, which are those of a gateway with one mesh.

    A body is searched for its model before the routes of the mesh decode it. Requests without a body go to the first
    mesh: their routes describe what all meshes share. Those that name a response go on to the next one while it is not
    found: the meshes share the responses that are stored here, but each has its own that other gateways began.
    """

    def __init__(
        self,
        meshes: ServedMeshes,
        make_routes: Callable[[ServedMesh], Routes],
        *,
        max_body_bytes: int,
        files_of: "Callable[[ServedMesh], BodyFiles | None]" = lambda mesh: None,
    ) -> None:
        """``files_of``: returns what takes the files out of the large bodies of a mesh; None: its model reads text."""
        self._files_of = files_of
        self._meshes = meshes
        self._make_routes = make_routes
        self._max_body_bytes = max_body_bytes
        self._routes: dict[tuple[str, ...], Routes] = {}  # by the names of the model

    def routes(self) -> Routes:
        """Return the routes of all models."""
        return {route: self._choose(route, handler) for route, handler in self._of(self._meshes.first).items()}

    def _choose(self, route: Route, first: Handler) -> Handler:
        """Return what handles a route. ``first``: its handler in the first mesh."""
        if route in _OF_A_RESPONSE:
            return self._at_any(route)
        return self._by_model(route) if route.method == "POST" and not route.parameters else first

    def _at_any(self, route: Route) -> Handler:
        async def handle(exchange: HttpExchange) -> None:
            unknown: errors.TokenloomError | None = None
            for mesh in self._meshes:
                try:
                    await self._of(mesh)[route](exchange)
                    return
                except (errors.NotFound, errors.Unavailable) as error:
                    if exchange.started:
                        raise
                    # Of a mesh that cannot say now whether it has the response, the client hears before all others.
                    if not isinstance(unknown, errors.Unavailable):
                        unknown = error
            assert unknown is not None, "a gateway has a mesh"
            raise unknown

        return handle

    def _by_model(self, route: Route) -> Handler:
        async def handle(exchange: HttpExchange) -> None:
            # Whose model it is for is only known when it was read.
            takers = map(self._files_of, self._meshes)
            files = next((each for each in takers if each is not None), None)
            body = await exchange.read_body(self._max_body_bytes, files)
            # Scanned for the name before it is decoded: only the routes of that model know which fields are valid. With
            # one mesh there is no scan.
            found = await _model_of(body.data)
            mesh = self._meshes.first if found is None else self._meshes.pick(found.name)
            await self._of(mesh)[route](exchange)

        return handle

    def _of(self, mesh: ServedMesh) -> Routes:
        if mesh.names not in self._routes:
            self._routes[mesh.names] = self._make_routes(mesh)
        return self._routes[mesh.names]


async def _model_of(data: bytes | bytearray) -> "_Found | None":
    """Return the value of ``model`` in a body; None for a body that is no JSON object, which the routes refuse."""
    if len(data) <= OFF_LOOP_BYTES:
        return _find(data)
    return await asyncio.to_thread(_find, data)


def _find(data: bytes | bytearray) -> "_Found | None":
    try:
        return _Found(msgspec.json.decode(_model.decode(data).model))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
