"""uvicorn inside an event loop that is not its own."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenloom.request import errors
from tokenloom.services.runtime.peers import addresses

from . import direct_writer
from .app import App

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; the parser itself knows no limit."""
HEAD_SECONDS = 60.0
"""From a connection's beginning, or a head's, to the end of that head."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed under a request."""
BACKLOG = 1024


class HttpServer:
    """Serves an application on one address."""

    def __init__(
        self, app: App, listen: str, *, insecure: bool, tls_cert: Path | None = None, tls_key: Path | None = None
    ) -> None:
        """Binds. Raises :class:`errors.Unavailable` when it cannot.

        Args:
            insecure: Other machines may talk to it in plain text.
            tls_cert, tls_key: What clients are shown, PEM, already found to be good; None: plain text.
        """
        address = addresses.parse(listen, field="http_listen")
        is_closed = insecure or tls_cert is not None
        remedy = "give --public-tls-cert or an API key"
        addresses.check_closed(address, insecure=is_closed, field="http_listen", remedy=remedy)
        self._path = address.path
        self._socket = _bind(address)
        port = 0 if address.path else self._socket.getsockname()[1]
        self.address = str(address) if address.path else str(addresses.Address(host=address.host, port=port))
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks for the client's address
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        self._server = _Server(config)
        self._served = asyncio.Event()

    async def serve(self) -> None:
        """Runs until :meth:`drain` or :meth:`stop`."""
        await self._server.serve([self._socket])
        self._served.set()

    async def drain(self) -> None:
        """Closes the listener and idle connections; returns when the last live one is done."""
        self._server.should_exit = True
        await self._served.wait()

    async def stop(self) -> None:
        """Drops what is left."""
        self._server.should_exit = self._server.force_exit = True
        state = self._server.server_state
        for task in list(state.tasks):
            task.cancel()
        for connection in list(state.connections):
            connection.transport.abort()
        self._socket.close()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's, not the HTTP server's."""
        yield


class _Protocol(HttpToolsProtocol):
    """Closes a connection whose request head has no end; lets the application write to the connection itself."""

    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watchers: direct_writer.Watchers = set()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        for on_lost in tuple(self._watchers):
            on_lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # the application begins at the loop's next turn
            direct_writer.offer(cast(direct_writer.Scope, self.scope), self.cycle, self._watchers)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
                self.transport.close()
            elif self._head_timer is None:
                self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a head that came early, behind a live request
            self._wait_for_head()
            return
        if self._in_head:
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")
        self.transport.close()


def _bind(address: addresses.Address) -> socket.socket:
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named: else a second small write waits 40 ms.
    protocol = 0 if address.path else socket.IPPROTO_TCP
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if not address.path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.path or (address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise errors.Unavailable(f"http_listen: cannot bind {address}: {error.strerror}") from None
    return listener
