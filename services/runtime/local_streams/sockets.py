"""The sockets of local streams. Each stands next to the unix socket on which the same process serves gRPC."""

import socket
import struct

from tokenloom.process import unix_socket

from .. import addresses

SUFFIX = ".calls"
_BACKLOG = 128
_CREDENTIALS = struct.Struct("iII")  # process, user and group
_STOPPED = b"Tt"  # by a signal, and by a debugger


def path_beside(address: str) -> str | None:
    """Return where a process that serves gRPC at ``address`` serves local streams. None: nowhere, because the address
    is no unix socket or its path is too long for the suffix."""
    if not address.startswith("unix:"):
        return None
    path = addresses.parse(address).path + SUFFIX
    return path if len(path.encode()) <= addresses.MAX_UNIX_PATH else None


def listen(path: str) -> socket.socket:
    """Return a listening socket, replacing one that a killed process left. Raises ``OSError``."""
    return unix_socket.listen(path, _BACKLOG)


def connect(path: str) -> socket.socket | None:
    """Return a connected socket without waiting; None when no process listens there."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        # A unix socket connects at once or not at all, so no wait is needed. A full backlog counts as no listener, and
        # the call goes through gRPC instead of blocking the event loop.
        connected.setblocking(False)
        connected.connect(path)
    except OSError:  # also BlockingIOError: the queue of connections is full
        connected.close()
        return None
    return connected


def is_stopped(connected: socket.socket) -> bool:
    """Return whether the peer's process is stopped (SIGSTOP, a debugger): it cannot answer, however long one waits.

    False for a process that runs, however busy, and for one that this process cannot see: of another PID namespace, or
    where ``/proc`` hides the processes of other users.
    """
    try:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, _, _ = _CREDENTIALS.unpack(credentials)
        with open(f"/proc/{process}/stat", "rb") as stat:
            # The second column is the command's name in parentheses and may itself hold spaces and parentheses, so the
            # state is the first word behind the last one.
            return stat.read().rpartition(b")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False
