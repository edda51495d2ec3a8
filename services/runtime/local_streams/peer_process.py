"""Asks the system about the process at the other end of a unix socket."""

import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # process, user and group
_STOPPED = b"Tt"  # by a signal, and by a debugger


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
