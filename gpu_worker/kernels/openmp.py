"""Finds the OpenMP library of the process, which kernels share with torch: a second one would start threads too."""

import ctypes
import functools
from pathlib import Path


def openmp_runtime() -> Path | None:
    """Return the OpenMP library that torch has loaded."""
    maps = Path("/proc/self/maps")
    return openmp_in(maps.read_text()) if maps.exists() else None


def openmp_in(maps: str) -> Path | None:
    """Return the OpenMP library among the files that a process has mapped, as ``/proc/PID/maps`` lists them."""
    # The path is the sixth column, and the last one: it may hold blanks.
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    return next((Path(path) for path in sorted(paths)), None)


@functools.cache
def expose_openmp() -> None:
    """Let libraries that name no OpenMP library use the one of the process. Raises ``OSError`` if there is none."""
    ctypes.CDLL(str(openmp_runtime() or "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)
