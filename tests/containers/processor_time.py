"""Processor time of containers, and of everything else on the machine, which says whether a time was disturbed."""

import contextlib
import os
import time
from pathlib import Path

import psutil

from benchmarks.report.machine import busy_seconds
from tests.containers.podman import podman

QUIET = 0.2
"""Cores that other programs may use while a time is taken that is compared with a limit."""


class OtherPrograms:
    """Measures the cores that programs other than the containers and this process use since construction."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._others = self._seconds()

    def cores(self) -> float:
        return max(0.0, (self._seconds() - self._others) / (time.monotonic() - self._started))

    @staticmethod
    def _seconds() -> float:
        return busy_seconds() - sum(os.times()[:4]) - _cgroup_seconds("libpod")


def container_cpu_seconds(name: str) -> float:
    """Return the processor time of a running container's processes."""
    return _cgroup_seconds(podman("inspect", "--format", "{{.Id}}", name))


def _cgroup_seconds(part: str) -> float:
    """Return the processor time of all processes whose control group has ``part`` in its name."""
    total = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if part in Path(f"/proc/{process.pid}/cgroup").read_text():
                total += sum(process.cpu_times()[:4])
    return total
