"""What a front is: a protocol of clients that a gateway speaks beside its own HTTP and gRPC API, such as KServe's.

Fronts that are built in and those of plugins come through here, with nothing but :class:`FrontParts` of the gateway.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from tokenloom.process.plugins import load_part
from tokenloom.request import errors

from ..http.internal_call import InternalCalls, InternalResponse
from ..http.route import Handler, Route, Routes, pattern_of
from ..settings.gateway_settings import FRONTS
from ..tenants.tenant import Tenant
from ..tenants.tenant_shares import TenantShares
from .served_meshes import ServedMeshes

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class GrpcService(NamedTuple):
    """A service for the gateway's gRPC server. Its calls need an API key where HTTP does."""

    add: Callable[[Any, Any], None]
    """The generated ``add_…Servicer_to_server``."""
    servicer: Any
    requests: Mapping[str, type[Message]] = {}
    """By method: the requests whose fields are counted before they are decoded, where clients write lists."""


class Front(NamedTuple):
    """What a front adds to a gateway.

    Attributes:
        grpc: gRPC services, whose methods no other service has.
        routes: What answers each method and path of HTTP, such as ``("POST", "/generate")``. Like each route of the
            gateway it needs an API key where there are any.
    """

    grpc: Sequence[GrpcService] = ()
    routes: Mapping[tuple[str, str], Handler] = {}


class FrontParts(NamedTuple):
    """What a front gets of the gateway."""

    calls: "GatewayCalls"
    """Sends a request of a tenant to any route of the gateway. What it takes and returns is the public HTTP API."""
    meshes: ServedMeshes
    """What serves each model, without HTTP; this may change with each release, as the two below."""
    shares: TenantShares
    """What each tenant has in work."""
    strict: bool
    """Whether unknown fields of requests are refused."""
    request_timeout: float
    """Seconds that a request may take."""


class GatewayCalls:
    """Calls the routes of this gateway, from within."""

    def __init__(self) -> None:
        self._calls: InternalCalls | None = None

    def begin(self, calls: InternalCalls) -> None:
        """Let requests through, now that there are routes."""
        self._calls = calls

    async def post(self, path: str, body: bytes, tenant: Tenant) -> InternalResponse:
        """Return the whole answer to a JSON body, whose checks, limits, counts and logs are those of a client's. If the
        caller is cancelled, so is the request. Raises ``Unavailable`` before the gateway serves."""
        if self._calls is None:
            raise errors.Unavailable("The gateway is still starting; retry.")
        return await self._calls.post(path, body, tenant, is_line=False)


def open_fronts(names: Sequence[str], parts: FrontParts, plugins: Sequence[str]) -> dict[str, Front]:
    """Return the fronts by name. Raises ``InvalidArgument`` naming one that cannot be loaded or is none."""
    return {name: _open(name, parts, plugins) for name in dict.fromkeys(names)}


def _open(name: str, parts: FrontParts, plugins: Sequence[str]) -> Front:
    try:
        made = load_part("fronts", name, FRONTS, plugins)(parts)
    except Exception as error:  # whatever the code of others raises
        raise errors.InvalidArgument(f"fronts: {name}: {type(error).__name__}: {error}", "fronts") from error
    front = Front(routes=made) if isinstance(made, Mapping) else made
    if not isinstance(front, Front):
        reason = f"returns {type(made).__name__}; a Front is needed, or its routes by method and path"
        raise errors.InvalidArgument(f"fronts: {name} {reason}", "fronts")
    return front


def front_routes(fronts: Mapping[str, Front], taken: Collection[Route]) -> Routes:
    """Return the routes of all fronts, given by name. Raises ``InvalidArgument`` for one whose path is ``taken``,
    whatever the method, because a path of the gateway's may need an admin key or none; for one that is there twice, and
    for one that no request would reach."""
    paths, owner = {route.pattern for route in taken}, dict[tuple[str, str], str]()
    routes: dict[Route, Handler] = {}
    for name, front in fronts.items():
        for key, handler in front.routes.items():
            route = _route(name, key)
            # A path that is found as it is comes before the gateway's own with ids in its place.
            if not paths.isdisjoint((route.pattern, pattern_of(route.pattern))):
                other = "the gateway"
            else:
                other = owner.setdefault((route.method, route.pattern), "")
            if other:
                raise errors.InvalidArgument(f"fronts: {route.method} {route.path} of {name} is {other}'s", "fronts")
            owner[route.method, route.pattern] = name
            routes[route] = handler
    return routes


def _route(name: str, key: object) -> Route:
    match key:
        case (str(method), str(path)) if method in _METHODS and path.startswith("/"):
            route = Route(method, path)
            if "*" not in route.pattern or pattern_of(route.pattern) == route.pattern:
                return route
            raise errors.InvalidArgument(
                f"fronts: {path} of {name}: parameters are the third part of a path, and the fifth if it has one",
                "fronts",
            )
    raise errors.InvalidArgument(
        f"fronts: {name} has a route {key!r:.80}; write (METHOD, PATH), with one of {', '.join(_METHODS)}", "fronts"
    )
