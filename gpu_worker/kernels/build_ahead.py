"""Builds kernels ahead for a level of processors, on this machine or with a cross compiler."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .compiler import KernelsUnavailable
from .levels import Level
from .prebuilt import FLAGS, FOLDER, SOURCES, Variant, library_name, variants

NEWEST_GLIBC = (2, 28)
"""Libraries that need a newer one would not load on distributions that are still supported."""
_TIMEOUT = 600.0
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def compiler_for(level: Level) -> str | None:
    """Return the compiler that this machine has for a level; None: it has none."""
    name = "g++" if level.machine == platform.machine() else f"{level.machine}-linux-gnu-g++"
    return shutil.which(name)


def build_ahead(
    level: Level, compiler: str, folder: Path = FOLDER, report: Callable[[Path], object] = lambda library: None
) -> list[Path]:
    """Build every library of a level into ``folder``/LEVEL, and remove those of other sources. Libraries that are
    there are kept. Calls ``report`` with each as it is ready. Raises `KernelsUnavailable`."""
    target = folder / level.name
    target.mkdir(parents=True, exist_ok=True)

    def build(variant: Variant) -> Path:
        library = target / library_name(*variant, level)
        if not library.exists():
            _compile(compiler, variant, level, library)
        report(library)
        return library

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        libraries = list(pool.map(build, variants()))
    for other in set(target.glob("*.so")) - set(libraries):
        other.unlink()
    return libraries


def needed_glibc(library: Path) -> tuple[int, int]:
    """Return the newest version of the C library that a library names."""
    found = _GLIBC.findall(library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def _compile(compiler: str, variant: Variant, level: Level, library: Path) -> None:
    source, macros = variant
    defined = (f"-D{name}={value}" for name, value in sorted(macros.items()))
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        object_file, result = Path(directory, "kernels.o"), Path(directory, "kernels.so")
        flags = (*FLAGS, *level.flags, *defined)
        _run(compiler, "-fopenmp", *flags, "-c", str(SOURCES / f"{source}.cpp"), "-o", str(object_file))
        # Without -fopenmp no OpenMP library is named: the name of the one that torch brings differs from wheel to
        # wheel, and another would be a second one, with threads of its own. -s leaves out the symbols that nothing
        # calls.
        _run(compiler, "-shared", "-s", str(object_file), "-o", str(result))
        if needed_glibc(result) > NEWEST_GLIBC:
            raise KernelsUnavailable(f"{library.name} needs glibc {needed_glibc(result)}, newer than {NEWEST_GLIBC}")
        result.chmod(0o644)
        result.replace(library)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        raise KernelsUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()}")
