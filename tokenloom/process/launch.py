"""Replaces itself by a command that the kernel kills with its parent: ``launch.py PARENT_PID COMMAND…``.

It runs as a script because a hook between fork and exec is not safe in a process with gRPC's threads. The process id
stays the same. It imports nothing of the package, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before the call
        raise SystemExit(1)


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    die_with_parent(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
