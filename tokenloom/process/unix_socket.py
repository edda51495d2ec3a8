"""Listens on unix sockets: in the place of one that a killed process has left, never of one on which a process listens.

A killed process leaves the file of its socket, and binding to it fails. This module imports nothing of ours, so that
the engine core and the services may use it.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator

_CLAIM_SECONDS = 2.0
"""How long the claim of another process is awaited. A claim takes far less; a lock that no process of ours holds must
not keep this one from starting."""
_POLL_SECONDS = 0.01
_SERVED = (0, errno.EAGAIN)
"""What connecting to a socket on which a process listens returns; EAGAIN: so many wait that no other one may."""


def listen(path: str, backlog: int, mode: int | None = None) -> socket.socket:
    """Return a listening socket, non-blocking. ``mode``: permissions of its file; None: those of the umask.

    Raises ``OSError``: ``EADDRINUSE`` if a process listens there, or the path is of another kind of file.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        with claimed(path):
            listener.bind(path)
            if mode is not None:
                os.chmod(path, mode)
            listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def claimed(path: str) -> Iterator[None]:
    """Remove what a killed process has left at ``path``; bind and listen within the block.

    Raises ``OSError`` (``EADDRINUSE``) if a process listens there. Other processes that claim the path wait until the
    block ends: a socket that is bound and does not listen yet looks like one of a killed process.
    """
    # The lock is not the directory's: a supervisor holds that of its mesh's directory as long as the mesh lives, and
    # each of the mesh's sockets waited for it in vain, 4 s at every start.
    with _locked(path):
        # A gateway that was killed leaves its socket's file, and no later one could bind. But a process may still
        # listen there, so the file is removed only if nothing accepts a connection.
        failure = _knock(path)
        if failure in _SERVED:
            raise OSError(errno.EADDRINUSE, "a process listens there")
        if failure == errno.ECONNREFUSED:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        yield


def identity(path: str) -> tuple[int, int]:
    """Return what distinguishes the file of a socket from a later one at the same path, as long as it is open."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def remove(path: str, identity_of_own: tuple[int, int]) -> None:
    """Remove a socket's file, unless a newer process has replaced it. To be called before the socket is closed: the
    number of its file may be given to another one afterwards. Idempotent."""
    with contextlib.suppress(OSError):
        if identity(path) == identity_of_own:
            os.unlink(path)


def is_served(path: str) -> bool:
    """Return whether a process listens at ``path``."""
    return _knock(path) in _SERVED


def _knock(path: str) -> int | None:
    """Return the error with which a connection fails, 0 for none; None where no socket is."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return None
    except OSError:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of a socket's path, if its file can be made: a file beside the socket, removed at the end."""
    lock = _take_lock(path + ".lock")
    try:
        yield
    finally:
        if lock is not None:
            # Removed while it is locked: a process that waits for this file sees that it is gone, and makes a new one.
            with contextlib.suppress(OSError):
                os.unlink(path + ".lock")
            os.close(lock)


def _take_lock(name: str) -> int | None:
    """Return the descriptor of the locked file of this name; None where there is none to be had in time."""
    until = time.monotonic() + _CLAIM_SECONDS
    while time.monotonic() < until:
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # to bind fails too, or succeeds beside a file of this name that is another user's
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(name)):
                return lock
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except FileNotFoundError:  # its holder has just removed it
            pass
        except OSError:  # the file system has no locks
            os.close(lock)
            return None
        os.close(lock)
    return None
