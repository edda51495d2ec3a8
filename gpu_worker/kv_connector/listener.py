"""Accepts connections on one thread and serves each on another, for all transports over sockets."""

import contextlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from tokenloom.engine_core.kv_transfer.kv_transport import KVReader, KVTransferError

from .socket_frames import decoded

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0
_HANDSHAKE_SECONDS = 5.0
_BACKLOG = 64
_RETRY_SECONDS = 0.1


class KVListener:
    """Owns a listening socket, its connections and their threads."""

    def __init__(
        self,
        server: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        name: str,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Args:
        server: A bound socket; :meth:`close` closes it.
        serve: Called with each connection on its own thread, with a timeout set for a handshake. The connection is
            closed when it returns. ``OSError`` ends it like a peer that hangs up.
        max_connections: Further connections are closed at once, because each costs a thread.
        tls: The server's TLS context; None: no TLS.
        """
        self._server = server
        self._serve = serve
        self._name = name
        self._max_connections = max_connections
        self._tls = tls
        self._lock = threading.Lock()
        self._closed = False
        self._connections: dict[threading.Thread, socket.socket] = {}
        server.listen(_BACKLOG)
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close every connection and wait for the threads. Idempotent."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        for sock in (self._server, *connections.values()):
            hang_up(sock)
        for thread in (self._acceptor, *connections):
            thread.join(_JOIN_SECONDS)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._closed:
                    return
                logger.warning("%s: could not accept a connection", self._name, exc_info=True)
                if self._server.fileno() < 0:
                    return
                time.sleep(_RETRY_SECONDS)  # without descriptors the next attempt would fail at once, too
                continue
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True)
        with self._lock:
            admitted = not self._closed and len(self._connections) < self._max_connections and self._begins(thread)
            if admitted:
                self._connections[thread] = connection
        if not admitted:
            connection.close()

    def _begins(self, thread: threading.Thread) -> bool:
        """Start a thread, which counts itself off only with the lock. Returns False if the system has none to give."""
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("%s: a connection is not served: %s", self._name, error)
            return False
        return True

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(self._prepared(connection))
        except OSError:
            pass
        except Exception:  # the edge: what one peer sends must not end the process, as a thread that fails does
            logger.exception("%s: a connection ended because of a bug", self._name)
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread()).close()

    def _prepared(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(_HANDSHAKE_SECONDS)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
        if self._tls is None:
            return connection
        secured = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # wrapping moved the descriptor to this socket
            self._connections[threading.current_thread()] = secured
            if self._closed:
                hang_up(secured)
        secured.do_handshake()
        return secured


def keep_alive(sock: socket.socket) -> None:
    """Detect within a minute that the peer's host is gone while neither side sends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def hang_up(sock: socket.socket) -> None:
    """Wake every thread that waits on the socket; its owner closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


SECONDS = 5.0
"""The timeout for a handshake of two messages, and for each message behind it."""


class Endpoint(msgspec.Struct, array_like=True):
    """Says where the offer is."""

    name: str
    """The name of an abstract unix socket, which leaves no file behind when the engine is killed."""
    token: bytes
    """Readers show it, because every process on the host can see the socket's name."""


def serve_offers(
    serve: Callable[[socket.socket], None], *, name: str, max_connections: int
) -> tuple[KVListener, bytes]:
    """Call ``serve`` with the connection of each reader that showed the token, on a thread of its own.

    Returns the listener, which the caller closes, and the endpoint for readers.
    """
    endpoint = Endpoint(f"tokenloom-kv-{secrets.token_hex(8)}", secrets.token_bytes(16))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(f"\0{endpoint.name}")
    own_user = os.geteuid()

    def check(connection: socket.socket) -> None:
        token = connection.recv(len(endpoint.token))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        user = struct.unpack("3i", credentials)[1]
        if user == own_user and hmac.compare_digest(token, endpoint.token):
            serve(connection)

    listener = KVListener(server, check, name=name, max_connections=max_connections)
    return listener, msgspec.msgpack.encode(endpoint)


def connect(endpoint: bytes) -> socket.socket:
    """Connect to an owner and show the token. The caller closes the connection, which has a timeout.

    Raises :class:`KVTransferError` (``transport``).
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        where = decoded(endpoint, Endpoint)
        connection.settimeout(SECONDS)
        connection.connect(f"\0{where.name}")
        connection.sendall(where.token)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        connection.close()
        raise KVTransferError("transport", f"the owner of the memory was not reached: {error}") from error
    return connection


class OfferTransport:
    """Fulfils the part of :class:`tokenloom.engine_core.kv_transfer.kv_transport.KVTransport` that is alike where an
    owner passes its memory to readers of the host."""

    serves_on_demand = False
    guards_bytes = True

    def __init__(self) -> None:
        self._listener: KVListener | None = None
        self._readers = weakref.WeakSet[KVReader]()
        self._lock = threading.Lock()

    def attend(self, seconds: float) -> None:
        """Do nothing: readers copy from the memory on their own."""

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        connection = connect(endpoint)
        try:
            reader = self._receive(connection, layout)
        except BaseException as error:
            connection.close()
            if isinstance(error, (OSError, msgspec.DecodeError)):
                raise KVTransferError("transport", f"the owner's memory was not passed: {error}") from error
            raise
        with self._lock:
            self._readers.add(reader)
        return reader

    def close(self) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.close()
        if self._listener is not None:
            self._listener.close()

    def _receive(self, connection: socket.socket, layout: str) -> KVReader:
        """Receive an owner's offer, and return what reads from it. The connection is closed, or is the reader's."""
        raise NotImplementedError
