"""Runs uvicorn inside the service's own event loop, and completes TLS handshakes: a connection counts from its
acceptance, not only from the end of its handshake."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import uvicorn

from tokenloom.process import unix_socket
from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.runtime import addresses
from tokenloom.services.runtime.host.held_port import adopt
from tokenloom.services.runtime.peers.tls import MeshTLS, PublicTLS, take_socket
from tokenloom.services.runtime.tasks import Tasks

from ..app import STOPPED
from ..client_flow import REQUESTS_PER_TURN, TurnShare
from ..http_exchange import FAREWELL_SECONDS, HttpExchange
from .connections import CONNECTION_LIMIT, MIN_IDLE_SECONDS, NO_RESPONSE, Connections
from .http_protocol import HttpContext, HttpProtocol

if TYPE_CHECKING:
    from ..held_table import PastResponse
    from .held_protocol import HeldProtocol

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that no connection is closed while a request is sent on it."""
BACKLOG = 4096
"""Connections that may wait to be accepted. A client whose connection finds no place tries again after a second."""
_DRAIN_POLL_SECONDS = 0.05
_DATE_SECONDS = 1.0
"""How often the ``Date`` of the answers is renewed."""


class HttpServer:
    """Serves an application on one address."""

    def __init__(
        self,
        app: Callable[[HttpExchange], Coroutine[Any, Any, None]],
        listen: str,
        *,
        budget: AdmissionLimit,
        connections: Connections,
        insecure: bool,
        tls: PublicTLS | MeshTLS | None = None,
        descriptor: int | None = None,
        field: str = "http_listen",
    ) -> None:
        """Bind the address, or adopt the inherited socket that listens there.

        Raises :class:`errors.Unavailable` when binding fails, and ``InvalidArgument`` for a descriptor that does not
        fit.

        Args:
            budget: Limits the bytes of all request bodies.
            connections: Limits the connections.
            insecure: Whether other machines may connect in plain text.
            tls: The certificate for clients, or that of the mesh, for peers that have one too; None: plain text.
            descriptor: Of the inherited socket. Its unaccepted connections outlive this process.
            field: The option of the address, for errors.
        """
        address = addresses.parse(listen, field=field)
        is_closed = insecure or tls is not None
        remedy = "give --public-tls-cert or an API key"
        addresses.check_closed(address, insecure=is_closed, field=field, remedy=remedy)
        self._drain = asyncio.Event()
        self._context = HttpContext(app, budget, connections, TurnShare(REQUESTS_PER_TURN), self._drain)
        self._make_protocol: Callable[..., HttpProtocol] = partial(HttpProtocol, context=self._context)
        self._server = _Server(_config(self._make_protocol))
        self._tls = tls
        self._fronts: TlsFronts | None = None  # complete handshakes; None in plain text, and before the start
        self._connections = connections
        self._is_held = descriptor is not None
        self._socket = _bind(address, field) if descriptor is None else adopt(descriptor, address, field=f"{field}_fd")
        self._path = "" if self._is_held else address.path
        self._identity = unix_socket.identity(self._path) if self._path else (0, 0)
        port = 0 if address.path else self._socket.getsockname()[1]
        self.address = str(address) if address.path else str(addresses.Address(host=address.host, port=port))
        self._served = asyncio.Event()

    def hold(self, make_protocol: "Callable[..., HeldProtocol]") -> None:
        """Serve connections by another protocol, which lets other gateways continue their responses. Call it before
        :meth:`serve`; not with TLS."""
        assert self._tls is None, "a connection is encrypted with what its process alone has"
        self._make_protocol = partial(make_protocol, context=self._context)
        self._server.config.http = cast(type[asyncio.Protocol], self._make_protocol)

    async def take(self, past: "PastResponse", connection: socket.socket) -> str:
        """Continue the response of another gateway, after :meth:`hold`; see :class:`.held_protocol.HeldProtocol`
        for what is returned. Owns the connection."""
        connection.setblocking(False)
        server = self._server
        make = cast("Callable[..., HeldProtocol]", self._make_protocol)
        protocol = make(config=server.config, server_state=server.server_state, app_state={}, past=past)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
        return protocol.found

    async def serve(self) -> None:
        """Serve until :meth:`drain` or :meth:`stop`."""
        if self._server.should_exit:  # it was stopped before this task ran, and its socket is closed
            self._served.set()
            return
        if self._tls is not None:
            # uvicorn itself would count a connection only after its handshake, and wait a minute for it.
            self._fronts = TlsFronts(self._tls.server_context(), self._connections, self._make_protocol)
            self._server.config.http = cast(type[asyncio.Protocol], self._fronts)
        await self._server.serve([self._socket])
        self._served.set()

    async def drain(self, live: Awaitable[object]) -> None:
        """End every connection without losing a request; return when none is left.

        Each connection ends with the next response that begins (``Connection: close``); one that stays idle is closed
        after a moment. An inherited socket accepts nothing more: its connections wait for the next process. Another
        one accepts until ``live`` has ended, because clients would be refused otherwise.
        """
        # Connections end before the listener does: load balancers learn late that a gateway stops, and kept-alive
        # clients not at all, so each connection says `Connection: close` with its next answer.
        self._drain.set()
        if self._is_held:
            self._server.close_listeners()
        await live
        self._remove_path()
        self._server.close_listeners()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while len(self._connections):
            self._connections.close_idle(with_fresh=loop.time() - began >= MIN_IDLE_SECONDS)
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self._server.end()
        await self._served.wait()

    async def stop(self) -> None:
        """End the remaining requests with an error, for which their clients have a moment, and all connections."""
        self._remove_path()
        self._server.end()
        state = self._server.server_state
        if tasks := list(state.tasks):
            for task in tasks:
                # The message of the cancellation tells the application that the server ends the request, and not its
                # client.
                task.cancel(STOPPED)
            await asyncio.wait(tasks, timeout=FAREWELL_SECONDS)
        for connection in list(state.connections):
            connection.transport.abort()
        if self._fronts is not None:
            await self._fronts.close()
        # Before the socket, which the event loop could not forget any more once it is closed; the task of `serve` may
        # run later.
        self._server.close_listeners()
        self._socket.close()

    def _remove_path(self) -> None:
        """Remove the file of a unix socket while the socket is open; later the path may be another process's."""
        if self._path:
            unix_socket.remove(self._path, self._identity)


async def _no_application(scope: object, receive: object, send: object) -> NoReturn:
    raise AssertionError("the protocol gives requests to the gateway's own application, without ASGI")


def _config(make_protocol: Callable[..., asyncio.BaseProtocol]) -> uvicorn.Config:
    return uvicorn.Config(
        _no_application,
        interface="asgi3",
        http=cast(type[asyncio.Protocol], make_protocol),  # uvicorn only calls it
        backlog=BACKLOG,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


class _Server(uvicorn.Server):
    """Runs uvicorn, except for signals and the end: uvicorn itself looks ten times a second whether it must exit."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Return after :meth:`end`."""
        # uvicorn looks ten times a second whether it must exit, and sleeps a tenth of a second when it does. Waiting
        # for an event, a gateway of a test stops in 26 instead of 226 ms, and an idle one wakes once a second.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._ended.wait()

    def end(self) -> None:
        """Have :meth:`serve` end the listeners and the tasks, and return. Idempotent."""
        self.should_exit = True
        self._ended.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the last requests' tasks. Connections have ended, or are aborted by the caller of :meth:`end`."""
        self.close_listeners()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks)

    def close_listeners(self) -> None:
        """Accept no more connections. Idempotent."""
        if self.started:
            for server in self.servers:
                server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


def _bind(address: addresses.Address, field: str) -> socket.socket:
    try:
        return unix_socket.listen(address.path, BACKLOG) if address.path else _listen_on_port(address)
    except OSError as error:
        raise errors.Unavailable(f"{field}: cannot bind {address}: {error.strerror}") from None


def _listen_on_port(address: addresses.Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is given; otherwise a second small write waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


HANDSHAKE_SECONDS = 10.0
"""Limit on the time of a handshake."""


class TlsFronts:
    """Makes a :class:`TlsFront` for each connection, and owns their handshakes."""

    def __init__(
        self, context: ssl.SSLContext, connections: Connections, make: Callable[..., asyncio.BaseProtocol]
    ) -> None:
        """``make``: makes the protocol that a connection gets after its handshake, with what uvicorn passes."""
        self._context = context
        self._connections = connections
        self._make = make
        # What clients cause, a wrong or late handshake, is no failure of the task.
        self._tasks = Tasks(lambda error: log.error("a TLS handshake failed", exc_info=error))

    def __call__(self, **named: Any) -> "TlsFront":
        """Called by uvicorn, in place of the protocol's class."""
        return TlsFront(self._context, self._connections, partial(self._make, **named), self._tasks)

    async def close(self) -> None:
        """Cancel the handshakes."""
        await self._tasks.close()


class TlsFront(asyncio.Protocol):
    """Counts a connection during its handshake; the protocol of HTTP gets it afterwards."""

    def __init__(
        self,
        context: ssl.SSLContext,
        connections: Connections,
        make: Callable[[], asyncio.BaseProtocol],
        tasks: Tasks,
    ) -> None:
        self._context = context
        self._connections = connections
        self._make = make
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._handshake: asyncio.Task[None] | None = None
        self._is_begun = self._is_open = False

    @property
    def idle_seconds(self) -> float:
        """How long the handshake takes: it is the first to make room."""
        return self._loop.time() - self._started_at

    @property
    def has_unread(self) -> bool:
        """False: a handshake that takes so long is given up."""
        return False

    def close_idle(self) -> None:
        """Close the connection; its handshake fails."""
        assert self._handshake is not None
        self._handshake.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        # uvicorn would count a connection only after its handshake and wait 60 s for it, so clients that never begin
        # one could take every descriptor.
        if not self._connections.admit(self, str(peer[0]) if isinstance(peer, tuple) else ""):
            self._connections.on_refused(NO_RESPONSE, CONNECTION_LIMIT)
            cast(asyncio.Transport, transport).abort()
            return
        accepted = take_socket(transport)
        self._handshake = self._tasks.spawn(self._shake_hands(accepted), name="tls handshake")
        self._handshake.add_done_callback(partial(self._ended, accepted))

    async def _shake_hands(self, accepted: socket.socket) -> None:
        self._is_begun = True
        with contextlib.suppress(OSError):  # also a wrong or late handshake
            await self._loop.connect_accepted_socket(
                partial(_Opening, self._open), accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )

    def _ended(self, accepted: socket.socket, _: asyncio.Task[None]) -> None:
        """Close the connection of a handshake that failed, or was cancelled at any time."""
        if self._is_open:
            return
        self._connections.on_refused(NO_RESPONSE, "TLS_HANDSHAKE")
        self._connections.remove(self)
        if not self._is_begun:
            accepted.close()
            return
        with contextlib.suppress(OSError):  # a transport owns the socket, and closes it when it reads the end
            accepted.shutdown(socket.SHUT_RDWR)

    def _open(self, encrypted: asyncio.Transport) -> None:
        """Give the connection to HTTP, as one of whose connections it counts from now on."""
        self._is_open = True
        self._connections.remove(self)
        protocol = self._make()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)


class _Opening(asyncio.Protocol):
    """Holds an encrypted connection until its handshake has ended."""

    def __init__(self, opened: Callable[[asyncio.Transport], None]) -> None:
        self._opened = opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened(cast(asyncio.Transport, transport))
