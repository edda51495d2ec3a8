"""Decrypts the connections of HTTP's clients. It passes bytes without reading them: the connection behind each
one is that of a client to its gateway, which holds it (``--hold-connections``)."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

from tokenloom.services.runtime.host.held_port import End
from tokenloom.services.runtime.host.limits import HANDSHAKE_SECONDS
from tokenloom.services.runtime.peers.tls import AcceptedSocket
from tokenloom.services.runtime.telemetry.logs import RareLine

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0
"""For so long a client of HTTP waits until a gateway accepts its connection: for as long as connections are held."""
_TRY_SECONDS = 5.0
"""Limit on one attempt to connect: a machine that is gone refuses nothing, and the next gateway would not be tried."""
_LOOK_SECONDS = 0.1
_QUIET_SECONDS = 1.0
"""A connection of HTTP whose gateway has sent nothing for so long has no answer that is being written."""
_BACKLOG = 4096
_LOG_SECONDS = 60.0


class _Counted(End):
    """One whose bytes are counted.

    Attributes:
        read_at: When the last bytes were read, in the event loop's time; 0: none were.
    """

    def __init__(self, num_bytes: list[int], side: int) -> None:
        super().__init__()
        self.read_at = 0.0
        self._num_bytes = num_bytes
        self._side = side
        self._time = asyncio.get_running_loop().time

    def data_received(self, data: bytes) -> None:
        self.read_at = self._time()
        self._num_bytes[self._side] += len(data)
        super().data_received(data)


class HttpRelay:
    """Gives each client's connection one to a gateway.

    Attributes:
        num_accepted: Connections of clients so far.
        num_broken: Those that a gateway has reset, or ended while its client waited for the first byte of an answer.
        num_bytes: From clients and from gateways so far, without encryption.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], context: ssl.SSLContext, max_connections: int, max_per_peer: int
    ) -> None:
        """``addresses``: host and port of gateways, at least one. ``max_connections``: of clients. A further one takes
        the place of the one that is in its handshake for the longest time; it is closed if none is. ``max_per_peer``:
        of clients at one address; a further one is closed."""
        self._addresses = list(addresses)
        self._context = context
        self._max_connections = max_connections
        self._max_per_peer = max_per_peer
        self._of_peer = Counter[str]()  # open connections by address, within their handshakes and after them
        self._refused = RareLine(_LOG_SECONDS)
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection until it has one to a gateway
        self._opening: dict[socket.socket, None] = {}  # those in their handshakes, the oldest first
        self._clients: set[_ClientEnd] = set()
        self.num_accepted = self.num_broken = 0
        self.num_bytes = [0, 0]

    @property
    def num_connections(self) -> int:
        """Those of clients that are open, after their handshakes."""
        return len(self._clients)

    async def serve(self, host: str, port: int, held: socket.socket | None = None) -> asyncio.Server:
        """Return a server that has begun to serve. ``held``: a socket that listens there already; None: it is opened.
        Raises ``OSError``."""
        place = {"host": host, "port": port, "backlog": _BACKLOG} if held is None else {"sock": held}
        return await asyncio.get_running_loop().create_server(lambda: AcceptedSocket(self._accept), **place)

    async def drain(self, seconds: float) -> None:
        """Return once no client waits for a part of an answer, as far as can be seen of bytes, or after some seconds.
        To be called when no further connection is accepted."""
        until = asyncio.get_running_loop().time() + seconds
        while (now := asyncio.get_running_loop().time()) < until:
            if all(client.is_quiet(now) for client in self._clients):
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End every connection."""
        for accepted in tuple(self._opening):
            _end(accepted)
        for task in self._tasks:
            task.cancel()
        for client in tuple(self._clients):
            if client.transport is not None:
                client.transport.abort()

    def _accept(self, accepted: socket.socket) -> None:
        # Counted from here on: clients that never begin a handshake could take every descriptor.
        try:
            peer = str(accepted.getpeername()[0])
        except OSError:  # the client has left
            accepted.close()
            return
        if self._of_peer[peer] >= self._max_per_peer:
            self._refuse(accepted, f"{peer} has {self._max_per_peer} (--max-client-connections-per-peer)")
            return
        if len(self._opening) + len(self._clients) >= self._max_connections:
            if not self._opening:
                self._refuse(accepted, f"clients have {self._max_connections} (--max-client-connections)")
                return
            oldest = next(iter(self._opening))
            del self._opening[oldest]
            _end(oldest)
        self._opening[accepted] = None
        self._of_peer[peer] += 1
        task = asyncio.get_running_loop().create_task(self._welcome(accepted, peer), name="a client of HTTPS")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        accepted.close()
        if count := self._refused.add():
            log.warning("closed %d new connections: %s", count, reason)

    async def _welcome(self, accepted: socket.socket, peer: str) -> None:
        """Complete a handshake, and connect the client to a gateway."""
        client = _ClientEnd(self.num_bytes, self._begin, partial(self._end, peer))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: client, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError:  # a wrong or late handshake
            self._leave(peer)
            _end(accepted)
            return
        finally:
            self._opening.pop(accepted, None)
        await self._connect(client)

    def _begin(self, client: "_ClientEnd") -> None:
        self.num_accepted += 1
        self._clients.add(client)

    def _end(self, peer: str, client: "_ClientEnd") -> None:
        self._clients.discard(client)
        self._leave(peer)
        self.num_broken += client.is_broken

    def _leave(self, peer: str) -> None:
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]

    async def _connect(self, client: "_ClientEnd") -> None:
        loop, transport = asyncio.get_running_loop(), client.transport
        assert transport is not None
        until = loop.time() + _CONNECT_SECONDS
        for address in self._turns():
            if transport.is_closing():
                return
            try:
                async with asyncio.timeout(_TRY_SECONDS):
                    _, gateway = await loop.create_connection(lambda: _GatewayEnd(self.num_bytes, client), *address)
            except (OSError, UnicodeError) as error:  # the latter from a name that is none
                if loop.time() > until:
                    log.warning("cannot connect to a gateway: %s", error)
                    client.is_broken = True
                    transport.abort()
                    return
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            client.join(gateway)
            return

    def _turns(self) -> Iterator[tuple[str, int]]:
        """Yield the gateways in turn, again and again."""
        while True:
            self._turn += 1
            yield self._addresses[self._turn % len(self._addresses)]


def _end(accepted: socket.socket) -> None:
    """End a connection in its handshake. A transport owns its socket, and closes it when it reads the end."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)


class _ClientEnd(_Counted):
    """The connection of a client, which is read once there is one to a gateway."""

    def __init__(
        self,
        num_bytes: list[int],
        begin: Callable[["_ClientEnd"], object],
        end: Callable[["_ClientEnd"], object],
    ) -> None:
        """``begin``, ``end``: called after its handshake, and when its connection has ended."""
        super().__init__(num_bytes, 0)
        self._begin = begin
        self._end = end
        self.is_broken = False
        """Whether a gateway has reset the connection, or ended it before an answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()
        self._begin(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self)
        super().connection_lost(error)

    def is_quiet(self, now: float) -> bool:
        """Return whether the client has, as far as can be seen, all that it has asked for. ``now``: of the event
        loop."""
        if self.transport is None or self.transport.get_write_buffer_size():
            return False
        heard_at = self.other.read_at if isinstance(self.other, _GatewayEnd) else 0.0
        return self.read_at <= heard_at and now - heard_at > _QUIET_SECONDS


class _GatewayEnd(_Counted):
    """The connection to a gateway of one client."""

    def __init__(self, num_bytes: list[int], client: _ClientEnd) -> None:
        super().__init__(num_bytes, 1)
        self.other = self._client = client

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:  # the client has not left before
            self._client.is_broken = error is not None or self._client.read_at > self.read_at
        super().connection_lost(error)
