"""Sends requests to the real application of a gateway, without a socket, as clients that may leave at any time."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.app import STOPPED, App, ClientAccess
from tokenloom.services.gateway.http.client_flow import ClientFlow, Headers
from tokenloom.services.gateway.http.http_exchange import JSON, HttpExchange
from tokenloom.services.gateway.http.request_body import RequestBody
from tokenloom.services.gateway.http.route import Routes
from tokenloom.services.gateway.tenants.api_keys import ApiKeys
from tokenloom.services.gateway.tenants.tenant import Tenant, TenantLimits
from tokenloom.services.gateway.tenants.tenant_shares import TenantShares

from .world import World

TENANTS = ("a", "b")
"""Their names are their keys."""
_PIECE = 64
"""Bytes of a body that arrive at once."""


@dataclass
class Answer:
    """Holds what a client has of its response.

    Attributes:
        status: 0: nothing.
        is_whole: As many bytes are there as were announced.
    """

    status: int = 0
    body: bytes = b""
    length: int | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.body) == self.length

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_ok(self) -> bool:
        return self.is_whole and self.status == 200


class Connection:
    """Stands for the connection of one request, and writes its response; the client may leave."""

    can_begin = is_open = False
    is_paused = True
    """Every write lets other tasks run."""
    left: int | None = None

    def __init__(self) -> None:
        self.answer = Answer()
        transport: Any = SimpleNamespace(
            pause_reading=lambda: None, resume_reading=lambda: None, is_closing=lambda: False, write=lambda _: None
        )
        self.flow = ClientFlow(transport)
        self.watch = self.flow.watch
        self.task: asyncio.Task[Any] | None = None

    def lose(self) -> None:
        """Let the client leave."""
        self.flow.lose()

    def stop(self) -> None:
        """Cancel the request, as a gateway does that stops."""
        assert self.task is not None
        self.task.cancel(STOPPED)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def begin(self, status: int, headers: Headers, body: bytes = b"", *, is_cut: bool = False) -> None:
        if not self.flow.is_lost:
            self.answer.status = status
            self.answer.length = int(dict(headers).get(b"content-length", -1))
            self.write(body)

    def write(self, body: bytes) -> None:
        if not self.flow.is_lost:
            self.answer.body += body

    def finish(self, body: bytes = b"") -> None:
        self.write(body)

    def abort(self) -> None:
        """Do nothing: a request has a connection of its own."""


@dataclass
class Clients:
    """Sends requests of several tenants to an application.

    Attributes:
        shares: What each tenant has in work.
        budget: Of the bytes of all bodies.
    """

    world: World
    shares: TenantShares
    keys: ApiKeys
    budget: AdmissionLimit = field(default_factory=lambda: AdmissionLimit(1 << 20))

    def application(self, routes: Routes) -> App:
        """Return the application that serves ``routes`` to these clients."""
        ignored = SimpleNamespace(count=lambda *_: None, add=lambda *_, **__: None)
        access = ClientAccess(self.keys, ApiKeys({}), None, self.shares)  # type: ignore[arg-type]
        return App(routes, access, counts=ignored, finished=ignored)  # type: ignore[arg-type]

    def send(
        self,
        app: App,
        method: str,
        path: str,
        body: Any = None,
        *,
        tenant: str = "a",
        headers: Sequence[tuple[bytes, bytes]] = (),
        name: str = "",
        may_leave: bool = True,
    ) -> "asyncio.Task[Answer]":
        """Begin a request. ``body``: JSON, or bytes with a content type among ``headers``. ``may_leave``: the plan may
        cancel it."""
        connection = Connection()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        kind = () if isinstance(body, bytes) else ((b"content-type", JSON),)
        all_headers = [
            (b"authorization", b"Bearer " + tenant.encode()),
            (b"content-length", str(len(data)).encode()),
            *kind,
            *headers,
        ]
        request_body = RequestBody(connection.flow, self.budget)
        exchange = HttpExchange((method, path, b""), all_headers, request_body, connection)
        sending, name = self._send(app, exchange, data, connection.answer), name or f"{method} {path}"
        if may_leave:
            cancel = self.world.random.choice((connection.lose, connection.stop))
            connection.task = self.world.actor(sending, name, cancel)
        else:
            connection.task = self.world.loop.create_task(sending, name=name)
        return connection.task

    async def _send(self, app: App, exchange: HttpExchange, data: bytes, answer: Answer) -> Answer:
        arriving = asyncio.get_running_loop().create_task(_arrive(data, exchange.body), name="arrival of a body")
        try:
            await app(exchange)
        finally:
            arriving.cancel()
        return answer

    def check_all_given_back(self) -> None:
        """Check that nothing is held any more when no request is in work."""
        check = self.world.check
        check(not self.budget.taken, f"{self.budget.taken} bytes of bodies stay reserved")
        outputs, sessions = self.shares.outputs.taken, self.shares.sessions.taken
        check(not outputs, f"{outputs} places of outputs stay taken")
        check(not sessions, f"{sessions} places of sessions stay taken")
        for share in self.shares:
            for what in ("live_outputs", "pending_outputs", "sessions", "body_bytes", "pending_grammars"):
                number = getattr(share, what)
                check(not number, f"tenant {share.name} still has {number} {what}")


def two_tenants(world: World, limits: TenantLimits | None = None, max_live: int = 64) -> Clients:
    """Return the clients of two tenants that share a gateway."""
    limits = limits or TenantLimits()
    tenants = {_digest(name): Tenant(name=name, cache_salt=name.encode() * 16, key=name) for name in TENANTS}
    shares = TenantShares(
        limits, is_shared=True, max_live=max_live, max_sessions=64, max_message_bytes=1 << 20, clock=world.loop.time
    )
    return Clients(world, shares, ApiKeys(tenants))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _arrive(data: bytes, body: RequestBody) -> None:
    for start in range(0, len(data), _PIECE):
        body.arrive(data[start : start + _PIECE])
        await asyncio.sleep(0)
    body.end()
