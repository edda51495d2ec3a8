"""Serves the connections that waited in a held socket while no gRPC server listened on its port.

gRPC cannot accept from a given socket. So its server listens on the same port with a socket of its own, to which the
kernel gives all new connections (``tokenloom.supervisor.ports`` says how). Those that were made while this
process did not run wait in the held socket. They are accepted here and passed to a second gRPC server with the same
handlers, which asks each client soon afterwards to connect anew (GOAWAY). Its calls in progress finish first.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import socket
import stat
from typing import cast

import grpc
import grpc.aio

from tokenloom.request.errors import InvalidArgument

from ..addresses import Address


def adopt(descriptor: int, address: Address, *, field: str) -> socket.socket:
    """Return the inherited socket, non-blocking and closed in the children of this process.

    Closing it leaves the socket that the other holder has open, with the connections that wait in its backlog.
    Raises ``InvalidArgument`` naming `field` unless `descriptor` is a stream socket that listens on the address's port.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise InvalidArgument(f"{field}: descriptor {descriptor} is not a socket", field)
    except (OSError, OverflowError):
        raise InvalidArgument(f"{field}: descriptor {descriptor} is not open", field) from None
    # A child that inherited the socket would keep the port open after both the supervisor and this process have ended.
    fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    held = socket.socket(fileno=descriptor)
    if held.type != socket.SOCK_STREAM or not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        # Detached, not closed: a wrong number may name a descriptor that another part of this process uses.
        held.detach()
        raise InvalidArgument(f"{field}: descriptor {descriptor} is not a listening stream socket", field)
    if _place_of(held) != (address.path or address.port):
        found = _place_of(held)
        held.detach()
        raise InvalidArgument(f"{field}: descriptor {descriptor} listens on {found}, not on {address}", field)
    held.setblocking(False)
    return held


def _place_of(held: socket.socket) -> str | int:
    """Return the path or the port of a listening socket."""
    name = held.getsockname()
    return str(name) if held.family == socket.AF_UNIX else int(name[1])


log = logging.getLogger(__name__)

STAY_SECONDS = 0.5
"""After this time a client is asked to connect anew, which takes its next calls past the relay."""


class HeldPort:
    """Owns the relays of one held socket, and the server behind them."""

    def __init__(
        self,
        held: socket.socket,
        edge: grpc.GenericRpcHandler,
        options: list[tuple[str, int]],
        calls: int,
        credentials: grpc.ServerCredentials | None,
    ) -> None:
        """Args:
        options: Of the server that listens on the port.
        calls: Limit on the calls that are open.
        credentials: What that server presents; None: plain text.
        """
        self._held = held
        self._credentials = credentials
        self._grpc = grpc.aio.server(
            options=[*options, ("grpc.max_connection_age_ms", round(STAY_SECONDS * 1000))],
            maximum_concurrent_rpcs=calls,
        )
        self._grpc.add_generic_rpc_handlers((edge,))
        # Random, because any process of the machine may connect to an abstract socket that it can name, past the port's
        # checks.
        self._name = f"tokenloom-{secrets.token_hex(16)}"
        self._accepting: asyncio.AbstractServer | None = None
        self._relays: set[_Relayed] = set()

    async def open(self) -> None:
        """Accept the connections that wait, and those that still come."""
        inner = f"unix-abstract:{self._name}"
        if self._credentials is None:
            self._grpc.add_insecure_port(inner)
        else:
            self._grpc.add_secure_port(inner, self._credentials)
        await self._grpc.start()
        loop = asyncio.get_running_loop()
        # After the server behind it has started: the connections that wait are accepted at once.
        self._accepting = await loop.create_server(self._relay, sock=self._held)

    def leave(self) -> None:
        """Leave new connections to the next process that adopts the socket. Idempotent."""
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None

    async def close(self, grace: float) -> None:
        """End the calls that still run after ``grace`` seconds."""
        self.leave()
        await self._grpc.stop(grace)
        for end in tuple(self._relays):
            end.abort()
        self._held.close()

    def _relay(self) -> "_Relayed":
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.setblocking(False)
        return _Outer(inner, f"\0{self._name}", self._relays)


class End(asyncio.Protocol):
    """Holds one of two connections, each of which gets the bytes that the other one reads, and pauses the other one
    while it cannot take them.

    Attributes:
        other: The other one; None: it is not joined yet, or has ended.
    """

    def __init__(self) -> None:
        self.other: End | None = None
        self.transport: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
        else:  # uvloop reads once even if reading was paused in `connection_made`
            self._early += data

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            if other.transport is not None:
                other.transport.close()  # once what was written has left

    def join(self, other: "End") -> None:
        """Read, and pass on what is read and what has arrived already. ``other``: of which this one is the other one.
        Both are closed if one has left meanwhile."""
        assert self.transport is not None
        assert other.transport is not None
        if self.transport.is_closing() or other.transport.is_closing():
            other.transport.close()
            self.transport.close()
            return
        self.other = other
        early, self._early = self._early, b""
        if early:
            other.transport.write(early)
        self.transport.resume_reading()


class _Relayed(End):
    """One that is ended with the held port."""

    def __init__(self, relays: "set[_Relayed]") -> None:
        super().__init__()
        self._relays = relays

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._relays.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._relays.discard(self)
        super().connection_lost(error)

    def abort(self) -> None:
        """Close without waiting for a client that does not read."""
        if self.transport is not None:
            self.transport.abort()


class _Outer(_Relayed):
    """The client's end: reads nothing until the other end is connected."""

    def __init__(self, inner: socket.socket, name: str, relays: "set[_Relayed]") -> None:
        super().__init__(relays)
        self._inner = inner
        self._name = name
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            self._inner.connect(self._name)  # to this process: it succeeds or fails at once
        except OSError as error:
            log.warning("cannot pass a waiting connection on: %s", error.strerror)
            self._inner.close()
            self.abort()
            return
        other = _Relayed(self._relays)
        other.other = self
        await asyncio.get_running_loop().create_unix_connection(lambda: other, sock=self._inner)
        self.join(other)  # the client may have gone meanwhile
