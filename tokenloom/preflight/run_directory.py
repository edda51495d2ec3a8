"""Checks the directory that holds the sockets of a mesh."""

import os
from pathlib import Path

from tokenloom.services.runtime.addresses import MAX_UNIX_PATH

from .refusal import CannotServe

_LONGEST_NAME = "mesh-12345678/output_processor-63-kv.sock.calls"
_NEEDED_BYTES = 16 << 20


def check_run_directory(path: Path) -> None:
    """Raise `CannotServe` if sockets in a directory under ``path`` would have too long names, or its disk is full."""
    longest = len(os.fsencode(path / _LONGEST_NAME))
    if longest > MAX_UNIX_PATH:
        raise CannotServe(
            f"{path} is too long for unix sockets, whose paths have at most {MAX_UNIX_PATH} bytes, by "
            f"{longest - MAX_UNIX_PATH}: set XDG_RUNTIME_DIR or TMPDIR to a shorter directory"
        )
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if free < _NEEDED_BYTES:
        raise CannotServe(
            f"{path} has {free / 1e6:.0f} MB left, and a mesh needs {_NEEDED_BYTES / 1e6:.0f} MB there: free space, or "
            "set XDG_RUNTIME_DIR or TMPDIR to another directory"
        )
