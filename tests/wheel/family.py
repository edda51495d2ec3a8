"""The processor time of a process with all that it started."""

import psutil


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, of its descendants, and of those of them that have ended."""
    parent = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in (parent, *parent.children(recursive=True)))
