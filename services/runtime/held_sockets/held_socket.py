"""Adopts a listening socket that the process has inherited, such as the supervisor's, which outlives the process."""

import fcntl
import os
import socket
import stat

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
