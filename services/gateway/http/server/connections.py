"""Bounds the HTTP connections of clients: all together, and those from one address."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from tokenloom.services.runtime.telemetry.logs import RareLine

log = logging.getLogger(__name__)

MIN_IDLE_SECONDS = 1.0
"""A connection that is idle for less is probably about to be used again."""
_LOG_SECONDS = 60.0
CONNECTION_LIMIT = "CONNECTION_LIMIT"
"""Reason of a connection that was not admitted."""
NO_RESPONSE = 0
"""Stands for the status of a refusal without a response: the connection was closed."""
_MAX_LOOKS = 32
"""Connections that are looked at to find an idle one: accepting one must not take longer the more there are."""

OnRefused = Callable[[int, str], None]


class ClientConnection(Protocol):
    """Describes what is needed of a connection."""

    @property
    def idle_seconds(self) -> float | None:
        """For how long no request has been received or answered; infinity before the first; None while one is."""

    @property
    def has_unread(self) -> bool:
        """Whether the client has sent what this process has not read yet."""

    def close_idle(self) -> None:
        """Close it; it is idle."""


class Connections:
    """Counts open connections. At a limit, an idle connection is closed for a new one; if none is idle, the new one is
    not admitted."""

    def __init__(self, limit: int, per_peer: int, on_refused: OnRefused = lambda status, reason: None) -> None:
        """``limit``: of all connections. ``per_peer``: of those from one address; unix sockets have none.
        ``on_refused``: called with the status and the reason of a response that no application made, because the
        connection was not admitted or what arrived on it is no request."""
        self.on_refused = on_refused
        self._limit = limit
        self._per_peer = per_peer
        # The connection that was looked at longest ago, or not at all, is first. Both are bounded by `limit`.
        self._all: OrderedDict[ClientConnection, str] = OrderedDict()
        self._of_peer: dict[str, OrderedDict[ClientConnection, str]] = {}
        self._refused = RareLine(_LOG_SECONDS)

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: ClientConnection, peer: str) -> bool:
        """Count a new connection and return True, or return False if the limits leave no room.

        ``peer``: the client's address; empty for a unix socket.
        """
        group = self._of_peer.get(peer) if peer else None
        # Silent connections displace each other and not streams. Connections cost descriptors, and a gateway without
        # any left cannot reach its peers either.
        if group is not None and len(group) >= self._per_peer and not self._close_idle(group):
            self._report(f"{peer} has {self._per_peer} connections (--max-connections-per-peer)")
            return False
        if len(self._all) >= self._limit and not self._close_idle(self._all):
            self._report(f"clients have {self._limit} connections (--max-connections, or the descriptor limit)")
            return False
        self._all[connection] = peer
        if peer:
            self._of_peer.setdefault(peer, OrderedDict())[connection] = peer
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that was closed; no effect if it was not admitted or is forgotten already."""
        peer = self._all.pop(connection, "")
        if peer and (group := self._of_peer.get(peer)) is not None:
            group.pop(connection, None)
            if not group:
                del self._of_peer[peer]

    def close_idle(self, *, with_fresh: bool) -> None:
        """Close every connection that has been idle for :data:`MIN_IDLE_SECONDS` and has sent nothing since.

        ``with_fresh``: also those on which no request has begun.
        """
        for connection in tuple(self._all):
            idle_seconds = connection.idle_seconds
            if idle_seconds is None or idle_seconds < MIN_IDLE_SECONDS or connection.has_unread:
                continue
            if with_fresh or not math.isinf(idle_seconds):
                self.remove(connection)
                connection.close_idle()

    def _close_idle(self, group: "OrderedDict[ClientConnection, str]") -> bool:
        """Close an idle connection of a group. Returns False if none was found."""
        for _ in range(min(_MAX_LOOKS, len(group))):
            connection = next(iter(group))
            idle_seconds = connection.idle_seconds
            if idle_seconds is not None and idle_seconds >= MIN_IDLE_SECONDS:
                self.remove(connection)
                connection.close_idle()
                return True
            # Looked at last from now on, so that at most 32 looks a connection find the idle ones among thousands of
            # busy ones.
            group.move_to_end(connection)
        return False

    def _report(self, reason: str) -> None:
        if self._refused.add():
            log.warning("refusing connections: %s, and none of them is idle", reason)
