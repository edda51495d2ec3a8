"""Finds the libraries of kernels for this CPU: built ahead, in the cache, or compiled now, several at once."""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenloom.process import cache_directory
from tokenloom.process.fall_backs import OF_PROCESS

from .levels import available_levels, native_flags
from .prebuilt import FLAGS, SOURCES, WITHOUT_OPENMP, Variant, expose_openmp, find_prebuilt

log = logging.getLogger(__name__)

_TIMEOUT = 180.0
"""In seconds. A build takes 1 to 25 s."""


class KernelsUnavailable(Exception):
    """Raised when kernels cannot be used on this machine; the message says why."""


def warn_unavailable(reason: str) -> None:
    """Note once for each reason that slower operations replace kernels, or slower kernels the fastest ones."""
    OF_PROCESS.add("slow_kernels", reason)


def build(source: str, march: str = "native", cache_dir: Path | None = None, **macros: int) -> Path:
    """Return the shared library of ``csrc/<source>.cpp`` with these macros.

    For the native CPU, or the level that the process is limited to, it is the one that was built ahead for the CPU's
    level; otherwise it is compiled, unless it is in the cache; without a compiler, one that was built ahead for a lower
    level. ``cache_dir`` is by default ``kernels`` in :func:`.cache_directory`; if it is given, nothing that was built
    ahead is used. Sources, compiler, command and CPU identify a library in the cache.

    Raises :class:`KernelsUnavailable`.
    """
    flags = native_flags() if march == "native" else (f"-march={march}",)
    levels = available_levels() if march == "native" and cache_dir is None else []
    if (ahead := find_prebuilt(source, macros, levels[:1])) is not None:
        return ahead
    try:
        return _build_or_explain(source, flags, cache_dir, macros)
    except KernelsUnavailable as error:
        if (ahead := find_prebuilt(source, macros, levels[1:])) is not None:
            warn_unavailable(f"{source} computes with the kernels of {ahead.parent.name}: {error}")
            return ahead
        raise


def _build_or_explain(
    source: str, machine_flags: tuple[str, ...], cache_dir: Path | None, macros: Mapping[str, int]
) -> Path:
    try:
        return _build_here(source, machine_flags, cache_dir, macros)
    except OSError as error:  # such as a full disk, or a cache that cannot be written to
        raise KernelsUnavailable(f"the kernels of {source} cannot be built: {error}") from error


def _build_here(source: str, machine_flags: tuple[str, ...], cache_dir: Path | None, macros: Mapping[str, int]) -> Path:
    compiler = _compiler_version()
    flags = [*FLAGS, *machine_flags, *(f"-D{name}={value}" for name, value in sorted(macros.items()))]
    contents = [path.read_text(encoding="utf-8") for path in (SOURCES / f"{source}.cpp", *SOURCES.glob("*.h"))]
    # All that a build depends on, so that what the cache holds can also be built here. The OpenMP library is no part of
    # it: the libraries name none, and every environment shares them. Once they named the one of torch: where its path
    # could not be linked, only machines with an empty cache saw it.
    identity = "\0".join([compiler, _cpu(), *flags, *contents])
    library = _writable(cache_dir) / f"{source}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        with _locked(library):
            if not library.exists():
                _compile(SOURCES / f"{source}.cpp", flags, library)
    if source not in WITHOUT_OPENMP:
        expose_openmp()
    return library


@contextlib.contextmanager
def _locked(library: Path) -> Iterator[None]:
    """Make other processes that need this library wait for it, instead of compiling it at the same time."""
    path = library.with_suffix(".lock")
    with open(path, "wb") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _compile(source: Path, flags: list[str], library: Path) -> None:
    log.info("compiling the CPU kernels of %s, once", source.stem)
    _remove_left(library)
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}-", dir=library.parent) as directory:
        object_file, result = Path(directory, "kernels.o"), Path(directory, "kernels.so")
        _run("g++", "-fopenmp", *flags, "-c", str(source), "-o", str(object_file))
        _run("g++", "-shared", str(object_file), "-o", str(result))
        result.replace(library)  # in one step: another process may be about to load it


def _remove_left(library: Path) -> None:
    """Remove what builds of a library that were killed have left. Not every file system has the lock that says that no
    other build runs, so those that may still run stay."""
    for path in library.parent.glob(f"{library.stem}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 2 * _TIMEOUT:
                shutil.rmtree(path, ignore_errors=True)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT).stdout
    except FileNotFoundError:
        raise KernelsUnavailable("there is no C++ compiler (g++)") from None
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"g++ took longer than {_TIMEOUT:.0f} s") from None
    except (subprocess.CalledProcessError, OSError) as error:
        output = getattr(error, "stderr", "") or str(error)
        raise KernelsUnavailable("g++ failed: " + next(iter(output.strip().splitlines()), "no message")) from None


@functools.cache
def _compiler_version() -> str:
    return _run("g++", "--version").splitlines()[0]


def _cpu() -> str:
    """Return what ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name")
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _writable(cache_dir: Path | None) -> Path:
    """Return the cache directory, or a private one that lives as long as the process if there can be no cache."""
    try:
        directory = cache_dir or cache_directory() / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return Path(_private_directory().name)
    return directory if os.access(directory, os.W_OK) else Path(_private_directory().name)


@functools.cache
def _private_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tokenloom-kernels-")


@contextlib.contextmanager
def parallel_build(variants: Sequence[Variant]) -> Iterator[None]:
    """Find or compile these kernels in threads while the body runs; the body's own :func:`.build` of one of them waits
    for it. Leaving waits for what is being compiled, and drops the rest if the body raised."""
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="kernels")
    try:
        builds = [pool.submit(_build, variant) for variant in variants]
        yield
        for each in builds:
            each.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _build(variant: Variant) -> None:
    source, macros = variant
    with contextlib.suppress(KernelsUnavailable):  # the layer that asks for the kernel says so
        build(source, "native", None, **macros)
