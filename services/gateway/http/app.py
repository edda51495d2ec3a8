"""The ASGI application: checks keys and origins, finds the handler of a path, and reports errors."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.logs import RequestLog

from ..tenants.api_keys import ApiKeys
from ..tenants.tenant_shares import TenantShares
from .browser_guard import BrowserGuard
from .error_form import ErrorForm
from .exchange import Exchange, Headers, MethodNotAllowed, Receive, Send
from .request_body import ClientDisconnected
from .response_counts import OTHER, ResponseCounts

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
Routes = Mapping[str, Mapping[str, Handler]]
"""Path to method to handler. A path may hold one ``*``, which stands for the id of an object."""

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/docs", "/openapi.json"})
"""Paths that need no key, for load balancers and browsers, which have none."""

INTERNAL = "/v1/batches/*/line"
"""Stands for the route of a line of a batch, so that the counts of routes are those of clients' requests."""
_MODEL_PATH = "/v1/models/"
_PREFLIGHT_SECONDS = 600
_CLIENT_LEFT = 499
"""Counts as the status of a request whose client left before the response, as in nginx."""


class App:
    """Serves the routes of the gateway."""

    def __init__(
        self,
        routes: Routes,
        keys: ApiKeys,
        admin_routes: Routes,
        admin_keys: ApiKeys,
        guard: BrowserGuard,
        shares: TenantShares,
        cors_origins: Collection[str] = (),
        error_forms: Mapping[str, ErrorForm] | None = None,
        *,
        counts: ResponseCounts,
    ) -> None:
        """Args:
        admin_keys: The keys that the admin routes accept, instead of ``keys``.
        guard: Checks the requests that need no key.
        shares: What each tenant has in work.
        cors_origins: Origins of web pages that may call the API from a browser; ``*``: all.
        error_forms: By path, how errors are reported; in OpenAI's form by default.
        counts: Counts every response.
        """
        self._routes = routes
        self._keys = keys
        self._admin_routes = admin_routes
        self._admin_keys = admin_keys
        self._guard = guard
        self._shares = shares
        self._cors = Cors(cors_origins) if cors_origins else None
        self._error_forms = error_forms or {}
        self._counts = counts

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are off"
        exchange = Exchange(scope, send)
        if (form := self._error_forms.get(exchange.path)) is not None:
            exchange.error_form = form
        if self._cors is not None:
            self._cors.allow(exchange)
        try:
            with exchange.body:
                await self._handler(exchange)(exchange)
        except ClientDisconnected:
            log.debug("%s %s: the client left", exchange.method, exchange.path)
            self._counts.count(exchange.route, exchange.status or _CLIENT_LEFT, "CANCELLED")
        except Exception as error:
            await _report(exchange, errors.of_exception(error), self._counts)
        else:
            self._counts.count(exchange.route, exchange.status)

    def _handler(self, exchange: Exchange) -> Handler:
        """Return what handles the request. Raises for a client without a key before it reveals which paths exist."""
        if self._cors is not None and self._cors.is_preflight(exchange):
            return self._cors.answer
        methods = self._admin_routes.get(exchange.path)
        keys = self._keys if methods is None else self._admin_keys
        if exchange.path not in OPEN_PATHS:
            exchange.tenant = exchange.internal_tenant or keys.authorize(_authorization(exchange.headers))
            if not keys.required and exchange.internal_tenant is None:
                self._guard.check(exchange.headers)
            if methods is None:  # an operator belongs to no tenant
                exchange.body.count_for(self._shares.of(exchange.tenant))
        exchange.route = exchange.path
        if methods is None and (methods := self._routes.get(exchange.path)) is None:
            exchange.route = _pattern(exchange.path)
            methods = self._routes.get(exchange.route)
        if methods is None:
            exchange.route = OTHER
        if exchange.internal_tenant is not None:
            exchange.route = INTERNAL
        if methods is None and exchange.path.startswith(_MODEL_PATH):
            raise errors.ModelNotFound(
                "this model is not served; GET /v1/models lists the served models", field="model"
            )
        if methods is None:
            raise errors.NotFound("Not found; see /docs for the available endpoints.")
        # An ASGI server drops the body of a response to HEAD.
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            raise MethodNotAllowed(exchange.method, methods)
        return handler


def _pattern(path: str) -> str:
    """Return the path with ``*`` in place of its third part."""
    parts = path.split("/", 5)
    return "/".join((*parts[:3], "*", *parts[4:])) if len(parts) > 3 else path


def _authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the client's key as an ``authorization`` header; Anthropic's clients send it as ``x-api-key``."""
    if (authorization := headers.get(b"authorization")) is None and (key := headers.get(b"x-api-key")) is not None:
        return b"Bearer " + key
    return authorization


async def _report(exchange: Exchange, error: errors.TokenloomError, counts: ResponseCounts) -> None:
    """Count an error, log it and send it to the client. A function of its own: a name for the error in the frame that
    has caught it would keep both alive until the garbage collector runs."""
    counts.count(exchange.route, exchange.status or error.http_status, error.reason)
    # Under overload, a line for each refusal would cost more than the refusal.
    is_fault = error.http_status >= 500 and not isinstance(error, errors.ResourceExhausted)
    level = logging.WARNING if is_fault else logging.DEBUG
    request_log = RequestLog(log, exchange.request_id.decode())
    request_log.log(level, "%s %s: %s", exchange.method, exchange.path, error.message)
    with contextlib.suppress(TimeoutError):
        await exchange.fail(error)


class Cors:
    """Lets browsers call the API from pages of the given origins."""

    def __init__(self, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def allow(self, exchange: Exchange) -> None:
        """Add the headers that a browser expects to the response, if the page's origin is allowed."""
        origin = exchange.headers.get(b"origin")
        if origin is not None and (self._any or origin in self._origins):
            exchange.extra_headers = (
                (b"access-control-allow-origin", b"*" if self._any else origin),
                (b"access-control-expose-headers", b"x-request-id, retry-after, x-tokenloom-ignored"),
                (b"vary", b"origin"),
            )

    def is_preflight(self, exchange: Exchange) -> bool:
        """Return whether a browser asks what it may send."""
        return exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers

    async def answer(self, exchange: Exchange) -> None:
        """Answer a preflight. A page of another origin gets no headers, and its browser gives up."""
        headers: Headers = ()
        if exchange.extra_headers:
            headers = (
                (b"access-control-allow-methods", b"GET, HEAD, POST"),
                (b"access-control-allow-headers", b"authorization, content-type, x-request-id, *"),
                (b"access-control-max-age", str(_PREFLIGHT_SECONDS).encode()),
            )
        await exchange.respond(200, b"", b"text/plain", headers)
