"""Notices within three seconds when workers on other machines end, also when such a machine is lost.

The executor holds a TCP connection to each worker, over which nothing is sent. The kernel of the worker's machine
closes it when the process ends, and answers the keepalive probes until then, however busy the process is; without
answers the kernel on this side gives the connection up.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Sequence

from ..data.errors import ExecutorFailedError

_CONNECT_SECONDS = 10.0
# Ray takes tens of seconds to call a silent node dead, and until then every request of the engine waits. A network that
# is silent for two seconds ends the engine instead.
_PROBE_SECONDS = 1
"""Without an answer for so long, the kernel asks, and asks again after as long."""
_SILENCE_MS = 1900
"""A machine that was asked and was silent for so long is lost."""


def open_lifeline(host: str) -> socket.socket:
    """Return a listener of a worker on a free port of ``host``, which is never read: the kernel accepts the executor's
    connection, and ends it with the process. The caller keeps the listener."""
    return socket.create_server((host, 0), backlog=1)


class WorkerLiveness:
    """Holds the connections to all workers of an executor, and watches them from a thread."""

    def __init__(self, addresses: Sequence[tuple[str, int]], on_lost: Callable[[int], None]) -> None:
        """Connect to the listeners, in order of their workers' ranks. ``on_lost``: called once, from the thread, with
        the first rank that ends.

        Raises ``ExecutorFailedError`` if a worker cannot be reached.
        """
        self._on_lost = on_lost
        self._is_closing = False
        self._connections: list[socket.socket] = []
        try:
            for address in addresses:
                self._connections.append(_connect(address))
        except OSError as error:
            self._close_all()
            rank, (host, port) = len(self._connections), addresses[len(self._connections)]
            raise ExecutorFailedError(f"worker {rank} cannot be reached at {host}:{port}: {error}") from None
        self._thread = threading.Thread(target=self._watch, name="worker-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connections without a call of ``on_lost``. Idempotent."""
        self._is_closing = True
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            except OSError:
                continue  # it has ended

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, rank)
            lost = next(key.data for key, _ in selector.select())  # nothing is sent, so it is an end
        if not self._is_closing:
            self._on_lost(lost)
        self._close_all()

    def _close_all(self) -> None:
        for connection in self._connections:
            connection.close()


def _connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    # It replaces the number of probes (TCP_KEEPCNT), which in whole seconds could not bound the time as closely.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    return connection
