"""Publishes an offer on an abstract unix socket to readers of this host that show a token and run as the same user."""

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable

import msgspec

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError

from .listener import KVListener
from .socket_frames import decoded

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
        if _user_of(connection) == own_user and hmac.compare_digest(token, endpoint.token):
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


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
