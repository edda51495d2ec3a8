"""Reads what the control groups of this process allow, as a pod's limits set them. Linux only."""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that the strictest group above this process allows; None: no group limits them."""
    limits = [limit for group in _groups("memory", root) if (limit := _memory(group)) is not None]
    return min(limits, default=None)


def cpu_limit(root: Path = _ROOT) -> float | None:
    """Return the cores that the strictest group above this process allows; None: no group limits them."""
    limits = [limit for group in _groups("cpu", root) if (limit := _cores(group)) is not None]
    return min(limits, default=None)


def throttled_seconds(root: Path = _ROOT) -> float:
    """Return for how long groups that reached their CPU limit have stopped their processes, together."""
    return sum(map(_throttled, _groups("cpu", root)))


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
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such files; or the quota is "max"
        return None


def _throttled(group: Path) -> float:
    try:
        values = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    except OSError:
        return 0.0
    return int(values.get("throttled_usec", 0)) / 1e6 + int(values.get("throttled_time", 0)) / 1e9
