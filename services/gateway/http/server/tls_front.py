"""Completes TLS handshakes: a connection counts from its acceptance, not only from the end of its handshake."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tokenloom.services.runtime.peers.tls import take_socket
from tokenloom.services.runtime.tasks import Tasks

from .connections import CONNECTION_LIMIT, NO_RESPONSE, Connections

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
"""Limit on the time of a handshake."""


class TlsFronts:
    """Makes a :class:`TlsFront` for each connection, and owns their handshakes."""

    def __init__(
        self, context: ssl.SSLContext, connections: Connections, make: Callable[..., asyncio.Protocol]
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
        make: Callable[[], asyncio.Protocol],
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
