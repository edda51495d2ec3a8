"""Reads what the control groups of this process allow, as a pod's limits set them, and its memory use. Linux only."""

import mmap
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that the strictest group above this process allows; None: no group limits them."""
    return min((limit for limit, _ in memory_limits(root)), default=None)


def memory_limits(root: Path = _ROOT) -> Iterator[tuple[int, Path]]:
    """Yield the bytes of memory that each group above this process allows, and its directory; nothing for one that
    limits none."""
    for group in _groups("memory", root):
        if (limit := _memory(group)) is not None:
            yield limit, group


class CpuGroups:
    """Reads the limits and counters of the groups above this process that can limit its processors.

    The groups are found once, because a worker reads them between two steps; their files are read anew each time.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        files = ("cpu.max", "cpu.cfs_quota_us", "cpu.stat")
        self._groups = [group for group in _groups("cpu", root) if any((group / name).exists() for name in files)]

    def limit(self) -> float | None:
        """Return the cores that the strictest group allows; None: no group limits them."""
        limits = [limit for group in self._groups if (limit := _cores(group)) is not None]
        return min(limits, default=None)

    def throttled_seconds(self) -> float:
        """Return for how long groups that reached their CPU limit have stopped their processes, together."""
        return sum(map(_throttled, self._groups))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directory of every group of this process that a controller may limit, version 2 or 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the path may name the host's tree, of which only the root is mounted.
        parts = Path(path.lstrip("/"))
        for directory in (parts, *parts.parents):
            if (base / directory).is_dir():
                yield base / directory


def _memory(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):  # no such file; or the limit is "max"
            continue
    return None


def _cores(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such files; or the quota is "max"
        return None


def _throttled(group: Path) -> float:
    try:
        values = dict(map(str.split, (group / "cpu.stat").read_text().splitlines()))
    except OSError:
        return 0.0
    return int(values.get("throttled_usec", 0)) / 1e6 + int(values.get("throttled_time", 0)) / 1e9


def resident_bytes() -> int:
    """Return the bytes of all pages that are in memory now, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
