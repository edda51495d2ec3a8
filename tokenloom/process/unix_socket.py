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
from pathlib import Path

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

    Raises ``OSError`` (``EADDRINUSE``) if a process listens there. Other processes that claim a path of the directory
    wait until the block ends: a socket that is bound and does not listen yet looks like one of a killed process.
    """
    with _locked(os.path.dirname(path) or "."):
        # A gateway that was killed left its socket's file, and no later one could bind. Taking the path of any file
        # there was no better: a process may still listen on it. So the socket itself is asked.
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
def _locked(directory: str) -> Iterator[None]:
    """Lock a directory, if it can be opened: then the lock leaves no file of its own."""
    try:
        lock = os.open(Path(directory), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # to bind fails too, or succeeds in a directory that may not be read
        yield
        return
    try:
        until = time.monotonic() + _CLAIM_SECONDS
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
            except OSError:  # the file system has no locks
                break
        yield
    finally:
        os.close(lock)
