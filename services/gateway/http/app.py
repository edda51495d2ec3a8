"""The HTTP edge: who may come in, which path does what, and how failures are told."""

import contextlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.logs import RequestLog

from .auth import ApiKeys
from .body import ClientDisconnected, Receive
from .cors import Cors
from .exchange import Exchange, MethodNotAllowed, Send

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
Routes = Mapping[str, Mapping[str, Handler]]
"""Path to method to handler."""

OPEN_PATHS = frozenset({"/health", "/ping", "/docs", "/openapi.json"})
"""What answers without a key: for load balancers and browsers, which have none. It tells nothing of anybody."""

_MODEL_PATH = "/v1/models/"
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class App:
    """The ASGI application."""

    def __init__(
        self,
        routes: Routes,
        keys: ApiKeys,
        admin_routes: Routes | None = None,
        admin_keys: ApiKeys | None = None,
        cors: Cors | None = None,
    ) -> None:
        """``admin_keys``: what the admin routes take instead of ``keys``; ``cors``: None: no page of another origin."""
        self._routes = routes
        self._keys = keys
        self._admin_routes = admin_routes or {}
        self._admin_keys = admin_keys or ApiKeys()
        self._cors = cors

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are off"
        exchange = Exchange(scope, receive, send, _request_id(scope))
        if self._cors is not None:
            self._cors.allow(exchange)
        try:
            await self._handler(exchange)(exchange)
        except ClientDisconnected:
            log.debug("%s %s: the client left", exchange.method, exchange.path)
        except Exception as error:
            known = errors.of_exception(error)
            level = logging.WARNING if known.http_status >= 500 else logging.DEBUG
            request_log = RequestLog(log, exchange.request_id.decode())
            request_log.log(level, "%s %s: %s", exchange.method, exchange.path, known.message)
            with contextlib.suppress(TimeoutError):
                await exchange.fail(known)

    def _handler(self, exchange: Exchange) -> Handler:
        """Raises for a client without a key before it tells which paths there are."""
        if self._cors is not None and self._cors.is_preflight(exchange):
            return self._cors.answer
        methods = self._admin_routes.get(exchange.path)
        if exchange.path not in OPEN_PATHS:
            keys = self._keys if methods is None else self._admin_keys
            keys.authorize(exchange.headers.get(b"authorization"))
        methods = methods or self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith(_MODEL_PATH):
            raise errors.ModelNotFound("no such model is served; GET /v1/models lists those that are", field="model")
        if methods is None:
            raise errors.NotFound("there is nothing at this path; /docs lists what there is")
        # An ASGI server drops the body of an answer to HEAD.
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            raise MethodNotAllowed(exchange.method, methods)
        return handler


def _request_id(scope: dict[str, Any]) -> bytes:
    """The client's, when it is fit for a header and a log line; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return secrets.token_hex(16).encode()
