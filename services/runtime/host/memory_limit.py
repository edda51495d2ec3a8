"""Reads how much memory the control groups of this process allow, as a pod's memory limit sets it. Linux only."""

from collections.abc import Iterator
from pathlib import Path


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that the strictest group above this process allows; None: no group limits them."""
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    """Yield the limit of every group of this process that has one, version 2 or 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        # In a container the path may name the host's tree, of which only the root is mounted.
        parts = Path(path.lstrip("/"))
        for directory in (parts, *parts.parents):
            try:
                text = (base / directory / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text()
            except OSError:
                continue
            if text.strip().isdigit():  # otherwise it is "max"
                yield int(text)
