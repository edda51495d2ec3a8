"""The application behind HTTP: checks keys and origins, finds the handler of a path, and reports errors."""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.addresses import Address
from tokenloom.services.runtime.telemetry.logs import RequestLog

from ..request_log.access_log import FinishedRequests
from ..request_log.finished_request import CURRENT_RECORD
from ..tenants.api_keys import ApiKeys
from ..tenants.tenant import NO_TENANT, Tenant
from ..tenants.tenant_shares import TenantShares
from .client_flow import ClientDisconnected, Headers
from .http_exchange import OPENAI, ErrorForm, HttpExchange, MethodNotAllowed, shaping_stage
from .response_counts import OTHER, ResponseCounts
from .route import Handler, Route, Routes, pattern_of

_ADVICE = "call it by its own address, set {option} or set API keys"


class BrowserGuard:
    """Checks the Host and Origin of requests without a key.

    A page can send requests to any address, and one whose name was made to resolve to the gateway's address can read
    the answers too. The browser states the name in Host and the page's site in Origin.
    """

    def __init__(self, listen: Address, allowed_hosts: Collection[str], cors_origins: Collection[str]) -> None:
        """Args:
        listen: Where HTTP is served. Browsers do not reach a unix socket, so there every Host is served.
        allowed_hosts: Further names without ports; ``*``: all.
        cors_origins: Origins whose pages may call the API; ``*``: all.
        """
        self._any_host = bool(listen.path) or "*" in allowed_hosts
        self._hosts = {listen.host.lower(), "localhost", *(host.strip("[]").lower() for host in allowed_hosts)}
        # The names under which clients reach all addresses of the machine are unknown, but an address is no name.
        self._any_address = listen.host in ("0.0.0.0", "::")
        self._any_origin = "*" in cors_origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in cors_origins)
        self._is_served = lru_cache(maxsize=128)(self._check_host)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise :class:`errors.PermissionDenied` for a Host or an Origin that is not served without a key."""
        host = headers.get(b"host", b"")
        if not self._any_host and not self._is_served(host):
            advice = _ADVICE.format(option="--allowed-hosts")
            raise errors.PermissionDenied(f"This gateway is not served under the request's Host; {advice}.")
        origin = headers.get(b"origin")
        if origin is None or self._any_origin or origin in self._origins:
            return
        # A page whose name was made to resolve to the gateway's address has an Origin that equals its Host, so the Host
        # has to be one of ours as well.
        if origin.partition(b"://")[2] != host:
            advice = _ADVICE.format(option="--cors-origins")
            raise errors.PermissionDenied(f"Pages of this Origin may not call this gateway; {advice}.")

    def _check_host(self, header: bytes) -> bool:
        text = header.decode("latin-1").lower()
        host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
        if host in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return self._any_address or address.is_loopback


log = logging.getLogger(__name__)

INTERNAL = "/v1/batches/*/line"
"""Stands for the route of a line of a batch, so that the counts of routes are those of clients' requests."""
STOPPED = "the gateway stopped before the answer was complete"
"""With this message the server cancels the requests that its drain has left."""
_PREFLIGHT_SECONDS = 600
_CLIENT_LEFT = 499
"""Counts as the status of a request whose client left before the response, as in nginx."""
_READING = ("GET", "HEAD", "OPTIONS")
"""Methods of probes, scrapes and pages: what answers them is counted but not recorded."""


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """Holds what decides who may call which routes."""

    keys: ApiKeys
    admin_keys: ApiKeys
    """The keys that the admin routes accept, instead of ``keys``."""
    guard: BrowserGuard
    """Checks the requests that need no key."""
    shares: TenantShares
    """What each tenant has in work."""
    cors_origins: Collection[str] = ()
    """Origins of web pages that may call the API from a browser; ``*``: all."""


class _Path:
    """Holds what is served under one path, whatever the method."""

    def __init__(self, route: Route, form: ErrorForm) -> None:
        self.pattern = route.pattern
        self.is_admin = route.is_admin
        self.is_open = route.is_open
        self.error_form = form
        self.handlers: dict[str, Handler] = {}  # by method
        self.pure = set[str]()  # the methods that any gateway may answer once more
        self.is_of_batches = route.is_of_batches


_NOT_SERVED = _Path(Route("", OTHER), OPENAI)


class App:
    """Serves the routes of the gateway."""

    def __init__(
        self,
        routes: Routes,
        access: ClientAccess,
        counts: ResponseCounts,
        finished: FinishedRequests,
        error_forms: Mapping[Route, ErrorForm] = MappingProxyType({}),
    ) -> None:
        """Args:
        counts: Counts every response.
        finished: Receives every request that has ended, except successful ones that only read.
        error_forms: How errors of some routes are reported; in OpenAI's form by default.
        """
        self._paths: dict[str, _Path] = {}
        for route, handler in routes.items():
            path = self._paths.setdefault(route.pattern, _Path(route, error_forms.get(route, OPENAI)))
            path.handlers[route.method] = handler
            # Another gateway has another directory of batches, and would answer 404.
            if route.is_pure or (route.method == "GET" and not route.is_of_batches):
                path.pure.add(route.method)
        self._access = access
        self._cors = Cors(access.cors_origins) if access.cors_origins else None
        self._counts = counts
        self._finished = finished
        self._shaping = shaping_stage()

    @property
    def routes(self) -> Mapping[str, Collection[str]]:
        """The methods of each path, with ``*`` for a parameter."""
        return {pattern: tuple(path.handlers) for pattern, path in self._paths.items()}

    async def __call__(self, exchange: HttpExchange) -> None:
        """Answer a request; an error is its answer too. Raises nothing but ``CancelledError``, and our own bugs."""
        # A context variable, so that the generation can fill in the record without each layer between passing it on;
        # every request has a task of its own.
        CURRENT_RECORD.set(exchange.record)
        path = self._paths.get(exchange.path) or self._paths.get(pattern_of(exchange.path), _NOT_SERVED)
        exchange.error_form, exchange.shaping = path.error_form, self._shaping
        if self._cors is not None:
            self._cors.allow(exchange)
        try:
            await self._handler(exchange, path)(exchange)
        except ClientDisconnected:
            log.debug("%s %s: the client left", exchange.method, exchange.path)
            self._end(exchange, exchange.status or _CLIENT_LEFT, "CANCELLED")
        except asyncio.CancelledError:
            # Only the server that stops cancels a client's request. Its words may be lost on the way: `gather`, for
            # one, raises an error of its own.
            task = asyncio.current_task()
            if exchange.internal_tenant is not None or task is None or not task.cancelling():
                exchange.body.close()
                if exchange.body.files is not None:
                    exchange.body.close_files()
                raise
            await self._report(exchange, errors.Unavailable(STOPPED))
        except Exception as error:
            await self._report(exchange, wire_errors.of_exception(error))
        else:
            self._end(exchange, exchange.status)

    def _end(self, exchange: HttpExchange, status: int, reason: str = "") -> None:
        """Drop the request's body, and count and record how the request has ended. ``reason``: of an error."""
        exchange.body.close()  # before an error is written, for which a slow client may take a second
        if exchange.body.files is not None:
            exchange.body.close_files()
        if (refused := exchange.body.refused_by_protocol) is not None:
            status, reason = refused
        self._counts.count(exchange.route, status, reason)
        if reason or exchange.method not in _READING:
            self._finished.add(
                exchange.record,
                request_id=exchange.request_id.decode(),
                route=exchange.route,
                key=exchange.key,
                began=exchange.began,
                status=status,
                reason=reason,
            )

    async def _report(self, exchange: HttpExchange, error: errors.TokenloomError) -> None:
        """Count an error, log it and send it to the client. A function of its own: a name for the error in the frame
        that has caught it would keep both alive until the garbage collector runs."""
        self._end(exchange, exchange.status or error.http_status, error.reason)
        # Under overload, a line for each refusal would cost more than the refusal.
        is_fault = error.http_status >= 500 and not isinstance(error, errors.ResourceExhausted)
        level = logging.WARNING if is_fault else logging.DEBUG
        request_log = RequestLog(log, exchange.request_id.decode())
        request_log.log(level, "%s %s: %s", exchange.method, exchange.path, error.message)
        with contextlib.suppress(TimeoutError):
            await exchange.fail(error)

    def _handler(self, exchange: HttpExchange, path: _Path) -> Handler:
        """Return what handles the request. Raises for a client without a key before it reveals which paths exist."""
        if self._cors is not None and self._cors.is_preflight(exchange):
            return self._cors.answer
        exchange.route = INTERNAL if exchange.is_line else path.pattern
        if not path.is_open:
            exchange.tenant = tenant = self._tenant(exchange, path)
            exchange.key = tenant.key
            if not path.is_admin:  # an operator belongs to no tenant
                exchange.body.count_for(self._access.shares.of(tenant))
        if path is _NOT_SERVED:
            raise errors.NotFound("Not found; see /docs for the available endpoints.")
        # The body of a response to HEAD is dropped where it would be written.
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = path.handlers.get(method)
        if handler is None:
            raise MethodNotAllowed(exchange.method, path.handlers)
        if exchange.let_go is not None and method not in path.pure:
            exchange.stays = path.is_of_batches
            exchange.let_go()
        return handler

    def _tenant(self, exchange: HttpExchange, path: _Path) -> Tenant:
        """Return the tenant of the client's key; where none is needed, check that the request may come from its page.
        Raises ``Unauthenticated`` and ``PermissionDenied``."""
        if exchange.internal_tenant is not None:
            if path.is_admin:
                raise errors.PermissionDenied("Requests from within the gateway have no admin key.")
            return exchange.internal_tenant
        headers = exchange.headers
        keys = self._access.admin_keys if path.is_admin else self._access.keys
        if not keys.required:
            if not exchange.is_of_peer:  # no page has a certificate of the mesh
                self._access.guard.check(headers)
            return NO_TENANT
        key = headers.get(b"authorization")
        if key is None and b"x-api-key" in headers:  # as Anthropic's clients send it
            key = b"Bearer " + headers[b"x-api-key"]
        return keys.authorize(key)


class Cors:
    """Lets browsers call the API from pages of the given origins."""

    def __init__(self, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def allow(self, exchange: HttpExchange) -> None:
        """Add the headers that a browser expects to the response, if the page's origin is allowed."""
        origin = exchange.headers.get(b"origin")
        if origin is not None and (self._any or origin in self._origins):
            exchange.extra_headers = (
                (b"access-control-allow-origin", b"*" if self._any else origin),
                (b"access-control-expose-headers", b"x-request-id, request-id, retry-after, x-tokenloom-ignored"),
                (b"vary", b"origin"),
            )

    def is_preflight(self, exchange: HttpExchange) -> bool:
        """Return whether a browser asks what it may send."""
        return exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers

    async def answer(self, exchange: HttpExchange) -> None:
        """Answer a preflight. A page of another origin gets no headers, and its browser gives up."""
        headers: Headers = ()
        if exchange.extra_headers:
            headers = (
                (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
                (b"access-control-allow-headers", b"authorization, content-type, x-request-id, *"),
                (b"access-control-max-age", str(_PREFLIGHT_SECONDS).encode()),
            )
        await exchange.respond(200, b"", b"text/plain", headers)
