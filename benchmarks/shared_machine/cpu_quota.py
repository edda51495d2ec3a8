"""Limits the processor time of a process by a control group, where the machine lets this process make one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PERIOD = 100_000
"""Of the quota, in µs: what container runtimes use."""


@contextlib.contextmanager
def cpu_quota(pid: int, cores: float, root: Path = Path("/sys/fs/cgroup")) -> Iterator[None]:
    """Let a process and its threads use so many cores. Its former group gets it back afterwards.

    Raises ``PermissionError`` with advice if this machine does not let this process make control groups.
    """
    base = root / "cpu" if (root / "cpu" / "cpu.cfs_quota_us").exists() else root
    group = base / f"tokenloom-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise PermissionError(
            f"cannot make a control group in {base} ({error.strerror}); run as root, without --quota "
            "or in a container with a CPU limit"
        ) from None
    try:
        _limit(group, cores)
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (base / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _limit(group: Path, cores: float) -> None:
    quota = int(cores * _PERIOD)
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
