"""Binds a worker to cores of the host."""

import os
from collections.abc import Collection


def bind_to(cpus: Collection[int]) -> None:
    """Bind the calling thread, and the threads that it starts from now on, to these cores. Empty: do nothing.

    Raises ``ValueError`` if this process may not use any of them, or if the system cannot bind threads.
    """
    if not cpus:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("cpus: only Linux can bind a worker to cores; leave the option out")
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ValueError(f"cpus: this process may not use core {', '.join(map(str, cpus))}, only {allowed}") from None
