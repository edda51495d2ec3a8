"""Examines the operating system and its limits."""

import ctypes
import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from tokenloom.services.runtime.host.descriptors import NEEDED

from ..platforms import platform_note
from ..run_directory import check_run_directory
from .finding import Finding, from_check

_FEW_DESCRIPTORS = 4096
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED_MEMORY = 256 << 20
_UNSYNCHRONIZED = 5
"""``TIME_ERROR`` of adjtimex."""
_TIMEX_BYTES = 256
"""More than the struct of adjtimex takes; zeros ask for the state only."""


def examine_host(run_directory: Path) -> Iterator[Finding]:
    """Yield findings about platform, cores, memory, limits, clock, and the directory of the meshes' sockets."""
    note = platform_note()
    where = f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"
    yield Finding("warn" if note else "ok", "platform", note or where)
    yield Finding("ok", "cores", f"{len(os.sched_getaffinity(0))} for this user's processes")
    yield _memory(Path("/proc/meminfo"))
    yield _shared_memory(Path("/dev/shm"))
    yield _huge_pages(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    yield _descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield from_check("sockets", f"in {run_directory}", lambda: check_run_directory(run_directory))
    yield _clock()


def _memory(file: Path) -> Finding:
    lines = file.read_text().splitlines() if file.is_file() else []
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)
    if free is None:
        return Finding("warn", "memory", f"unknown, because {file} does not say how much is available")
    text = f"{free / 1e9:.1f} GB available"
    if free < _LITTLE_MEMORY:
        return Finding("warn", "memory", f"{text}: stop other programs, or limit the KV cache with --kv-cache-memory")
    return Finding("ok", "memory", text)


def _shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("warn", "shared memory", f"{folder} does not exist: mount a tmpfs there")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    text = f"{free / 1e6:,.0f} MB free in {folder}"
    if free < _LITTLE_SHARED_MEMORY:
        return Finding("warn", "shared memory", f"{text}: start containers with --shm-size=1g, for PyTorch's processes")
    return Finding("ok", "shared memory", text)


def _huge_pages(file: Path) -> Finding:
    text = file.read_text() if file.is_file() else ""
    chosen = text.partition("[")[2].partition("]")[0] or "not supported"
    if chosen in ("always", "madvise"):
        return Finding("ok", "huge pages", f"transparent huge pages: {chosen}")
    way_out = f"`echo madvise > {file}` as root makes the KV cache faster"
    return Finding("warn", "huge pages", f"transparent huge pages: {chosen}: {way_out}")


def _descriptors(limit: int) -> Finding:
    if 0 <= limit < NEEDED:
        return Finding(
            "fail", "open files", f"at most {limit}, and a part needs {NEEDED}: raise the limit with ulimit -n"
        )
    if 0 <= limit < _FEW_DESCRIPTORS:
        return Finding("warn", "open files", f"at most {limit}: raise the limit with ulimit -n, for many connections")
    return Finding("ok", "open files", "at most " + ("any number" if limit < 0 else str(limit)))


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (AttributeError, OSError):
        return Finding("warn", "clock", f"{now}; whether it is synchronized is unknown on this platform")
    if state == _UNSYNCHRONIZED:
        return Finding("warn", "clock", f"{now}, not synchronized: run chrony or ntpd, for certificates and traces")
    return Finding("ok", "clock", now)
