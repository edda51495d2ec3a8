"""Reads the state of processes from ``/proc``: a fault counts only if its effect is seen there."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_SECONDS = 0.005
PROC = Path("/proc")


def state(pid: int, proc: Path = PROC) -> str | None:
    """Return the kernel's letter for the state of a process, ``T`` if it is stopped; None: it is gone or a zombie."""
    try:
        letter = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return None if letter in "ZX" else letter


def children(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield the processes that a process has started."""
    for listed in (proc / str(pid) / "task").glob("*/children"):
        try:
            yield from map(int, listed.read_text().split())
        except OSError:
            continue


def descendants(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield the processes that a process and its children have started."""
    for child in children(pid, proc):
        yield child
        yield from descendants(child, proc)


def command(pid: int, proc: Path = PROC) -> list[str]:
    """Return the arguments of a process; empty if it is gone."""
    try:
        return (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def running_module(root: int, module: str, proc: Path = PROC) -> int | None:
    """Return the process below ``root`` that runs a module whose name ends with ``module``; None: no process does."""
    for pid in descendants(root, proc):
        if any(argument.endswith(module) for argument in command(pid, proc)):
            return pid
    return None


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
