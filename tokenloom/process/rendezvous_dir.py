"""A directory in which processes of one host find each other, and the removal of those that killed ones have left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_YOUNG_SECONDS = 60
"""A directory that was made just now may not be locked yet."""


class RendezvousDir:
    """Holds a private directory, which is locked as long as its owner runs.

    The kernel drops the lock when the owner ends in any way, also where processes of several containers share the
    directory for temporary files and do not see each other. So the next owner removes what a killed one has left.

    Attributes:
        path: The directory.
    """

    def __init__(self, kind: str = "ranks") -> None:
        """``kind``: what meets there, for the name; 1 to 6 characters, because the path of a unix socket is short."""
        prefix = f"tl-{kind}-"
        _remove_left(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Remove the directory. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_left(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # One of another user cannot be opened; one that is locked, or gone by now, has another owner.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _YOUNG_SECONDS and (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Return a descriptor that locks a directory; None if another process has locked it. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
