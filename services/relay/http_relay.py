"""Decrypts the connections of HTTP's clients. It passes bytes without reading them: the connection behind each
one is that of a client to its gateway, which holds it (``--hold-connections``)."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import cast

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0
"""For so long a client of HTTP waits until a gateway accepts its connection: for as long as connections are held."""
_TRY_SECONDS = 5.0
"""Limit on one attempt to connect: a machine that is gone refuses nothing, and the next gateway would not be tried."""
_HANDSHAKE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_QUIET_SECONDS = 1.0
"""A connection of HTTP whose gateway has sent nothing for so long has no answer that is being written."""
_BACKLOG = 4096


class _End(asyncio.Protocol):
    """One of two connections, each of which gets the bytes that the other one reads.

    Attributes:
        other: The other one; None: it is not made yet, or has ended.
        read_at: When the last bytes were read, in the event loop's time; 0: none were.
        num_bytes: How many were read.
    """

    def __init__(self) -> None:
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None
        self.read_at = 0.0
        self.num_bytes = 0
        self.early = b""
        """What was read before there was another one: uvloop reads once although ``connection_made`` has paused it."""
        self._time = asyncio.get_running_loop().time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.read_at = self._time()
        self.num_bytes += len(data)
        if self.other is None:
            self.early += data
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        ends = self.transport, None if self.other is None else self.other.transport
        if not all(each is not None and each.can_write_eof() for each in ends):  # TLS ends in both directions at once
            return False
        cast(asyncio.Transport, ends[1]).write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            if other.transport is not None:
                other.transport.close()  # once what was written has left


class HttpRelay:
    """Gives each client's connection one to a gateway.

    Attributes:
        num_accepted: Connections of clients so far.
        num_broken: Those that a gateway has reset, or ended while its client waited for the first byte of an answer.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], context: ssl.SSLContext | None, max_connections: int = 4096
    ) -> None:
        """``addresses``: host and port of gateways, at least one. ``context``: None: the clients send plain text.
        ``max_connections``: of clients; further ones are closed."""
        self._addresses = list(addresses)
        self._context = context
        self._max_connections = max_connections
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection that waits for a gateway
        self._clients: set[_ClientEnd] = set()
        self.num_accepted = self.num_broken = 0
        self._ended_bytes = [0, 0]

    @property
    def num_connections(self) -> int:
        """Those of clients that are open."""
        return len(self._clients)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes from clients and from gateways so far, without encryption."""
        live = [client.counts() for client in tuple(self._clients)]
        from_clients, from_gateways = zip(self._ended_bytes, *live, strict=True)
        return sum(from_clients), sum(from_gateways)

    async def serve(self, host: str, port: int, held: socket.socket | None = None) -> asyncio.Server:
        """Return a server that has begun to serve. ``held``: a socket that listens there already; None: it is opened.
        Raises ``OSError``."""
        limit = None if self._context is None else _HANDSHAKE_SECONDS
        place = {"host": host, "port": port, "backlog": _BACKLOG} if held is None else {"sock": held}
        return await asyncio.get_running_loop().create_server(
            lambda: _ClientEnd(self._begin, self._end),
            **place,
            ssl=self._context,
            ssl_handshake_timeout=limit,
        )

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
        for task in self._tasks:
            task.cancel()
        for client in tuple(self._clients):
            if client.transport is not None:
                client.transport.abort()

    def _begin(self, client: "_ClientEnd") -> None:
        self.num_accepted += 1
        self._clients.add(client)
        if len(self._clients) > self._max_connections:
            cast(asyncio.Transport, client.transport).abort()
            return
        task = asyncio.get_running_loop().create_task(self._connect(client), name="connect to a gateway")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, client: "_ClientEnd") -> None:
        self._clients.discard(client)
        for at, count in enumerate(client.counts()):
            self._ended_bytes[at] += count
        self.num_broken += client.is_broken

    async def _connect(self, client: "_ClientEnd") -> None:
        loop, transport = asyncio.get_running_loop(), client.transport
        assert transport is not None
        until = loop.time() + _CONNECT_SECONDS
        for address in self._turns():
            if transport.is_closing():
                return
            try:
                async with asyncio.timeout(_TRY_SECONDS):
                    _, gateway = await loop.create_connection(lambda: _GatewayEnd(client), *address)
            except (OSError, UnicodeError) as error:  # the latter from a name that is none
                if loop.time() > until:
                    log.warning("cannot connect to a gateway: %s", error)
                    client.is_broken = True
                    transport.abort()
                    return
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            client.use(gateway)
            return

    def _turns(self) -> Iterator[tuple[str, int]]:
        """Yield the gateways in turn, again and again."""
        while True:
            self._turn += 1
            yield self._addresses[self._turn % len(self._addresses)]


class _ClientEnd(_End):
    """The connection of a client, which is read once there is one to a gateway."""

    def __init__(self, begin: Callable[["_ClientEnd"], object], end: Callable[["_ClientEnd"], object]) -> None:
        """``begin``, ``end``: called when the client has connected, and when its connection has ended."""
        super().__init__()
        self._begin = begin
        self._end = end
        self.gateway: _GatewayEnd | None = None
        self.is_broken = False
        """Whether a gateway has reset the connection, or ended it before an answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()
        self._begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self)
        super().connection_lost(exc)

    def use(self, gateway: "_GatewayEnd") -> None:
        """Pass on what the client sends from now on, and what has arrived already."""
        assert self.transport is not None
        assert gateway.transport is not None
        self.gateway = gateway
        if self.transport.is_closing() or gateway.transport.is_closing():  # one has left meanwhile
            gateway.transport.close()
            self.transport.close()
            return
        self.other = gateway
        early, self.early = self.early, b""
        if early:
            gateway.transport.write(early)
        self.transport.resume_reading()

    def counts(self) -> tuple[int, int]:
        """Return the bytes from the client and from its gateway."""
        return self.num_bytes, 0 if self.gateway is None else self.gateway.num_bytes

    def is_quiet(self, now: float) -> bool:
        """Return whether the client has, as far as can be seen, all that it has asked for. ``now``: of the event
        loop."""
        if self.transport is None or self.transport.get_write_buffer_size():
            return False
        heard_at = 0.0 if self.other is None else self.other.read_at
        return self.read_at <= heard_at and now - heard_at > _QUIET_SECONDS


class _GatewayEnd(_End):
    """The connection to a gateway of one client."""

    def __init__(self, client: _ClientEnd) -> None:
        super().__init__()
        self.other = self._client = client

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:  # the client has not left before
            self._client.is_broken = exc is not None or self._client.read_at > self.read_at
        super().connection_lost(exc)
