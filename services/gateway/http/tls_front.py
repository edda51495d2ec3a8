"""Completes TLS handshakes: a connection counts from its acceptance, not only from the end of its handshake."""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tokenloom.services.runtime.host.tasks import Tasks

from .connections import Connections

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
        self._tasks = Tasks(lambda _: None)  # a handshake ends with its connection, not with an error

    def __call__(self, **named: Any) -> "TlsFront":
        """Called by uvicorn, in place of the protocol's class."""
        return TlsFront(self._context, self._connections, partial(self._make, **named), self._tasks)

    async def close(self) -> None:
        """Cancel the handshakes."""
        await self._tasks.close()


class TlsFront(asyncio.Protocol):
    """Holds a connection during its handshake, then gives it to the protocol of HTTP."""

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
        self._transport: asyncio.Transport | None = None

    @property
    def idle_seconds(self) -> float:
        """How long the handshake takes: it is the first to make room."""
        return self._loop.time() - self._started_at

    def close_idle(self) -> None:
        """Close the connection; its handshake fails."""
        assert self._transport is not None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if not self._connections.admit(self, str(peer[0]) if isinstance(peer, tuple) else ""):
            self._transport.abort()
            return
        # Its first step runs before the loop reads from the socket.
        self._tasks.spawn(self._shake_hands(self._transport), name="tls handshake")

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        protocol = self._make()
        try:
            encrypted = await self._loop.start_tls(
                transport, protocol, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError:  # also a wrong or late handshake
            transport.abort()
            return
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            self._connections.remove(self)
        if encrypted is None:  # the connection was closed meanwhile
            return
        protocol.connection_made(encrypted)  # it counts from now on as one of HTTP
