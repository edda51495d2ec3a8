"""Calls the HTTP application from within the gateway, as a client of a tenant would."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenloom.request.reservation import Reservation

from ..tenants.tenant import Tenant
from ..tenants.tenant_share import TenantShare
from .app import App
from .byte_budget import ByteBudget
from .http_exchange import DIRECT_WRITER, INTERNAL_TENANT, JSON, REQUEST_BODY
from .request_body import too_large


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

    def __init__(self, app: App, budget: ByteBudget) -> None:
        """``budget``: of the bytes of all bodies."""
        self._app = app
        self._budget = budget

    async def post(self, path: str, body: bytes, tenant: Tenant) -> InternalResponse:
        """Return the response to a JSON body. The request is sheddable: it is refused first under load."""
        reply, pieces = InternalResponse(), list[bytes]()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status, reply.headers = message["status"], dict(message["headers"])
            else:
                pieces.append(message.get("body", b""))

        headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "extensions": {
                DIRECT_WRITER: _NoConnection(),
                REQUEST_BODY: _WholeBody(body, self._budget),
                # The tenant stands in the scope and not in a header, so that no client can name one. The checks,
                # limits, logs and answers of a line are those of any request, and no second road to the engines repeats
                # them.
                INTERNAL_TENANT: tenant,
            },
        }
        await self._app(scope, _receive, send)
        reply.body = b"".join(pieces)
        return reply


async def _receive() -> dict[str, Any]:
    raise AssertionError("the body is there already")


class _NoConnection:
    """Stands for the connection of a client that never leaves."""

    is_open = can_begin = False

    def is_last(self) -> bool:
        return False

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], object]:
        return lambda: None


class _WholeBody:
    """Holds a body that has arrived; it counts for the gateway and for the tenant, as any body does."""

    is_incomplete = False
    refused_by_protocol = None

    def __init__(self, data: bytes, budget: ByteBudget) -> None:
        self.data = data
        self._budget = budget
        self._reserved = budget.empty()
        self._of_tenant: Reservation | None = None

    def __enter__(self) -> "_WholeBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count_for(self, share: TenantShare) -> None:
        self._of_tenant = share.take_bytes(len(self.data), len(self.data))

    async def read(self, limit: int, length: int | None) -> None:
        if len(self.data) > limit:
            raise too_large(limit)
        if not self._reserved.amount:
            self._reserved.absorb(self._budget.reserve(len(self.data)))

    def close(self) -> None:
        """Drop the bytes and release what they count."""
        self._reserved.release()
        if self._of_tenant is not None:
            self._of_tenant.release()
        self.data = b""
