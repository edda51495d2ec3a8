"""Describes the machine of a figure, and which processes used its cores during the measurement."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tokenloom.gpu_worker.kernels.levels import available_levels, processor_features

_NAMED = {"avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm"}
"""Features of a processor that decide which kernels run."""


def describe() -> dict[str, Any]:
    """Return what a published figure must name."""
    return {
        "cpu": _cpu_model(),
        "kernels": next((level.name for level in available_levels()), "none"),
        "features": sorted(processor_features() & _NAMED),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


class Load:
    """Measures CPU use over time, in cores: of this process with its children, and of all others.

    If the others are near zero, the machine was quiet; otherwise the figure was disturbed.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy, self._own = busy_seconds(), _own_seconds()

    def cores(self) -> dict[str, float]:
        """``own_cores`` and ``other_cores`` since construction."""
        wall = time.monotonic() - self._started
        own = _own_seconds() - self._own
        others = busy_seconds() - self._busy - own
        return {"own_cores": round(own / wall, 3), "other_cores": round(max(0.0, others / wall), 3)}


def busy_seconds() -> float:
    """Return the processor time that all programs of the machine have used since it started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system + tree_seconds(os.getpid())


def tree_seconds(pid: int, wanted: Callable[[psutil.Process], bool] = lambda _: True) -> float:
    """Return the CPU seconds of a process and its descendants that are ``wanted``. Ended processes do not count."""
    total = 0.0
    for process in _tree(pid):
        try:
            if wanted(process):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class ServiceCpu:
    """Measures CPU seconds by service for a local mesh. The engine's core is separate from its front."""

    def __init__(self, pids: Mapping[str, list[int]]) -> None:
        """``pids`` maps a service to its instances' process ids."""
        self._pids = pids
        self._before = self._seconds()

    def used(self) -> dict[str, float]:
        """Return the CPU seconds by service since construction."""
        return {name: seconds - self._before[name] for name, seconds in self._seconds().items()}

    def _seconds(self) -> dict[str, float]:
        result = {}
        for service, pids in self._pids.items():
            for name, wanted in _split(service).items():
                result[name] = sum(tree_seconds(pid, wanted) for pid in pids)
        return result


def resident_mib(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """Return the resident memory of each service's largest process, in MiB."""
    sizes = {}
    for service, roots in pids.items():
        for name, wanted in _split(service).items():
            trees = [process for pid in roots for process in _tree(pid)]
            sizes[name] = round(max((_resident_bytes(each, wanted) for each in trees), default=0) / 2**20, 1)
    return sizes


def _resident_bytes(process: psutil.Process, wanted: Callable[[psutil.Process], bool]) -> int:
    try:
        return int(process.memory_info().rss) if wanted(process) else 0
    except psutil.NoSuchProcess:
        return 0


def _split(service: str) -> dict[str, Callable[[psutil.Process], bool]]:
    if service != "engine":
        return {service: lambda _: True}
    return {"engine front": lambda process: not _is_core(process), "engine core": _is_core}


def _is_core(process: psutil.Process) -> bool:
    return any(argument.endswith("core_main") for argument in process.cmdline())
