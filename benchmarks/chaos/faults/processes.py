"""Reads the state of processes from ``/proc``: a fault counts only if its effect is seen there."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenloom.supervisor.process_tree import PROC, children, command, state

__all__ = ["children", "command", "descendants", "policies", "running_module", "send_signal", "state", "until"]

_POLL_SECONDS = 0.005


def descendants(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield the processes that a process and its children have started."""
    for child in children(pid, proc):
        yield child
        yield from descendants(child, proc)


def running_module(root: int, module: str, proc: Path = PROC) -> list[int]:
    """Return the processes below ``root`` that run a module whose name ends with ``module``."""
    return [
        pid
        for pid in descendants(root, proc)
        if state(pid, proc) is not None and any(argument.endswith(module) for argument in command(pid, proc))
    ]


def policies(pid: int, policy: int | None = None) -> set[int]:
    """Return how the kernel schedules the threads of a process, first as ``policy`` says, if it is given; empty: it
    is gone."""
    found = set()
    for thread in (PROC / str(pid) / "task").glob("*"):
        try:
            if policy is not None:
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
            found.add(os.sched_getscheduler(int(thread.name)))
        except ProcessLookupError:
            continue
    return found


async def until(is_true: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; False if it does not within the given time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not is_true():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def send_signal(pid: int, number: int) -> bool:
    """Send a signal; False: the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
