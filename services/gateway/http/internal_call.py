"""Calls the HTTP application from within the gateway, as a client of a tenant would."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from tokenloom.request.limits import AdmissionLimit

from ..tenants.tenant import Tenant
from .app import App
from .client_flow import ClientFlow, Headers
from .http_exchange import JSON, HttpExchange
from .request_body import RequestBody


@dataclass(slots=True)
class InternalResponse:
    """Holds a response.

    Attributes:
        status: Of HTTP.
        headers: With lower-case names.
        body: All of it.
    """

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    @property
    def request_id(self) -> str:
        """The id of the request, as in the gateway's log."""
        return self.headers.get(b"x-request-id", b"").decode("latin-1")

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the request may be sent again; None: it must not be."""
        if self.status not in (429, 503) or self.headers.get(b"x-should-retry") == b"false":
            return None
        digits = self.headers.get(b"retry-after", b"")
        return float(digits) if digits.isdigit() else 1.0


class InternalCalls:
    """Sends requests through the same routes, limits, counts and logs as those of clients."""

    def __init__(self, app: App, budget: AdmissionLimit) -> None:
        """``budget``: of the bytes of all bodies."""
        self._app = app
        self._budget = budget

    async def post(self, path: str, body: bytes, tenant: Tenant, *, is_line: bool = True) -> InternalResponse:
        """Return the response to a JSON body. ``is_line``: it is a line of a batch, which is refused first under load;
        otherwise a client waits for the answer."""
        flow = ClientFlow(cast(asyncio.Transport, _NoTransport()))
        whole, collected = RequestBody(flow, self._budget), _CollectedResponse()
        # Through the class that counts bodies: large lines would otherwise pass the limits of gateway and tenant.
        whole.arrive(body)
        whole.end()
        headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
        # The checks, limits, logs and answers of a line are those of any request, and no second road to the engines
        # repeats them.
        exchange = HttpExchange(("POST", path, b""), headers, whole, collected, internal_tenant=tenant)
        exchange.is_line = is_line
        await self._app(exchange)
        return InternalResponse(collected.status, collected.headers, b"".join(collected.pieces))


class _NoTransport:
    """Stands for the connection of a client that never leaves; everything has been read from it."""

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""


class _CollectedResponse:
    """Keeps a response. Nothing is written without waking the task of the request, because a line has no stream."""

    can_begin = is_open = is_paused = False
    left: int | None = None

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []

    async def drain(self) -> None:
        raise AssertionError("there is always room")

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], object]:
        return lambda: None

    def begin(self, status: int, headers: Headers, body: bytes = b"", *, is_cut: bool = False) -> None:
        self.status, self.headers = status, dict(headers)
        self.write(body)

    def write(self, body: bytes) -> None:
        self.pieces.append(body)

    def finish(self, body: bytes = b"") -> None:
        self.write(body)

    def abort(self) -> None:
        """Do nothing: what is there is all that the caller gets."""
