"""What ``tokenloom doctor`` finds on this machine: memory, limits, clock, packages, kernels and certificates."""

import ctypes
import datetime
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tokenloom.gpu_worker.kernels.levels import available_levels
from tokenloom.gpu_worker.kernels.prebuilt import FLAGS, FOLDER, library_name, variants
from tokenloom.process import hides_gpus
from tokenloom.process.plugins import find_package, installed_packages
from tokenloom.services.engine.records.engine_settings import may_have_gpu
from tokenloom.services.runtime.host.limits import NEEDED

from .host import check_encoder_packages, check_engine_packages, check_run_directory, platform_note
from .small_files import CannotServe

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line for the user."""

    level: Level
    """``fail``: ``tokenloom serve`` would not start; ``warn``: it would be slower, or lack something."""
    subject: str
    text: str
    """What was found and, unless it is in order, the way out."""


def from_check(subject: str, in_order: str, check: Callable[[], object]) -> Finding:
    """Return the finding of a check that raises ``CannotServe``; ``in_order`` is the text if it does not."""
    try:
        check()
    except CannotServe as refused:
        return Finding("fail", subject, str(refused))
    return Finding("ok", subject, in_order)


_FEW_DESCRIPTORS = 4096
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED_MEMORY = 256 << 20
_UNSYNCHRONIZED = 5
"""``TIME_ERROR`` of adjtimex."""
_TIMEX_BYTES = 256
"""More than the struct of adjtimex takes; zeros ask for the state only."""


def examine_host(run_directory: Path, gpus_shown: str | None) -> Iterator[Finding]:
    """Yield findings about platform, cores, memory, limits, clock, and the directory of the meshes' sockets."""
    note = platform_note()
    where = f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"
    yield Finding("warn" if note else "ok", "platform", note or where)
    yield Finding("ok", "cores", f"{len(os.sched_getaffinity(0))} for this user's processes")
    yield _gpus(Path("/proc/driver/nvidia/gpus"), gpus_shown)
    yield _memory(Path("/proc/meminfo"))
    yield _shared_memory(Path("/dev/shm"))
    yield _huge_pages(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    yield _descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield from_check("sockets", f"in {run_directory}", lambda: check_run_directory(run_directory))
    yield _clock()


def _gpus(folder: Path, shown: str | None) -> Finding:
    """``shown``: the GPUs that the environment leaves to programs; None: all."""
    lines = [line for file in sorted(folder.glob("*/information")) for line in file.read_text().splitlines()]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    if not names:
        return Finding("ok", "GPUs", "none that NVIDIA's driver lists: models are computed on the CPU")
    text = f"{len(names)} ({', '.join(sorted(set(names)))})"
    if shown is not None and hides_gpus(shown):
        text += f", but CUDA_VISIBLE_DEVICES={shown} hides them: models are computed on the CPU"
        return Finding("warn", "GPUs", text)
    if not may_have_gpu():
        return Finding("warn", "GPUs", f"{text}, but the installed torch computes on CPUs: install one for CUDA")
    if shown is not None:
        text += f", of which CUDA_VISIBLE_DEVICES shows {shown}"
    return Finding("ok", "GPUs", f"{text}: each engine of `tokenloom serve` takes the next ones")


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


_OPTIONAL = {
    "transformers": "models that are not built in (docs/reference/models.md)",
    "xgrammar": "the other library for structured outputs",
    "nixl": "KV blocks over RDMA",
}


def examine_engine() -> Iterator[Finding]:
    """Yield findings about the engine."""
    torch = f"torch {metadata.version('torch')}" if find_spec("torch") else "torch"
    yield from_check("packages", f"{torch} and the other packages of the engine are installed", check_engine_packages)
    for name, purpose in _OPTIONAL.items():
        if find_spec(name) is None:
            yield Finding("ok", "packages", f"{name} is not installed; {purpose} would need tokenloom[{name}]")
    yield _images()
    yield _processor()
    yield _kernels()


_IMPORT_SECONDS = 60.0


def _images(torchvision: str = "torchvision") -> Finding:
    """Return whether encoders can read images and sounds. ``torchvision``: the name of that module."""
    try:
        check_encoder_packages()
    except CannotServe:
        lacking = "av, pillow or transformers is not installed; images and sounds would need tokenloom[encoder]"
        return Finding("ok", "images", lacking)
    # Nothing here needs it. PyPI's wheel is built for CUDA; where it cannot be imported beside torch, transformers
    # cannot import any of its models either, and says so in words that do not name it.
    if find_spec(torchvision) is not None:
        command = [sys.executable, "-c", f"import {torchvision}"]
        if subprocess.run(command, capture_output=True, timeout=_IMPORT_SECONDS, check=False).returncode:
            way_out = "encoders, and models of transformers, do not start: uninstall it, nothing needs it"
            return Finding("warn", "images", f"torchvision cannot be imported beside this torch: {way_out}")
    return Finding("ok", "images", "av, pillow and transformers are installed")


_PROBE = "#include <omp.h>\n#include <cmath>\nint threads() { return omp_get_max_threads(); }\n"
_COMPILER_SECONDS = 60.0


def _processor() -> Finding:
    levels = available_levels()
    if levels:
        return Finding("ok", "processor", f"level {levels[0].name}")
    return Finding("warn", "processor", "neither AVX2 nor Arm: models are computed slowly")


def _kernels() -> Finding:
    """Report where the kernels of the best level come from."""
    lacking = _compiler_failure()
    for level in available_levels():
        folder = FOLDER / level.name
        built = [variant for variant in variants() if (folder / library_name(*variant, level)).is_file()]
        if built:
            rest = "g++ compiles others" if not lacking else f"others run as PyTorch's operations: {lacking}"
            return Finding("ok", "kernels", f"{len(built)} built ahead for {level.name}; {rest}")
    if not lacking:
        return Finding("ok", "kernels", "none built ahead; g++ compiles them at the first start, and they are kept")
    way_out = "install g++, or PyTorch's slower operations run"
    return Finding("warn", "kernels", f"none built ahead and {lacking}: {way_out}")


def _compiler_failure() -> str:
    """Return why no kernels can be compiled; empty: a small library with OpenMP can be."""
    with tempfile.TemporaryDirectory(prefix="tokenloom-doctor-") as folder:
        command = ["g++", "-fopenmp", *FLAGS, "-march=native", "-shared", "-x", "c++", "-", "-o", f"{folder}/probe.so"]
        try:
            done = subprocess.run(command, input=_PROBE, capture_output=True, text=True, timeout=_COMPILER_SECONDS)
        except FileNotFoundError:
            return "no g++"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"g++ does not run ({type(error).__name__})"
    said = next(iter(done.stderr.strip().splitlines()), "no message")
    return f"g++ fails ({said})" if done.returncode else ""


_SOON = datetime.timedelta(days=7)


def examine_plugins() -> Iterator[Finding]:
    """Yield a finding for each installed package with plugins, none of which is imported."""
    for name in installed_packages():
        try:
            yield Finding("ok", "plugins", f"{find_package(name)}: loaded only where --plugins names {name}")
        except ValueError as error:
            yield Finding("warn", "plugins", f"{error}: --plugins refuses it")


def examine_certificates(folder: Path, now: datetime.datetime | None = None) -> Iterator[Finding]:
    """Yield a finding for each certificate in a folder and its folders; ``now`` is by default the time."""
    from cryptography import x509  # imported here: it costs time

    now = now or datetime.datetime.now(datetime.UTC)
    files = sorted(folder.rglob("*.crt"))
    if not files:
        yield Finding("ok", "certificates", f"none in {folder}; a mesh on one machine needs none")
    for file in files:
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError) as error:
            yield Finding("fail", "certificates", f"{file} cannot be read ({error}): run `tokenloom certs`")
            continue
        yield _about(file, certificate.not_valid_before_utc, certificate.not_valid_after_utc, now)


def _about(file: Path, begin: datetime.datetime, end: datetime.datetime, now: datetime.datetime) -> Finding:
    if now < begin:
        return Finding("fail", "certificates", f"{file} is valid from {begin:%Y-%m-%d %H:%M} UTC on: set the clock")
    if now >= end:
        return Finding("fail", "certificates", f"{file} expired on {end:%Y-%m-%d}: renew it with `tokenloom certs`")
    if end - now < _SOON:
        return Finding("warn", "certificates", f"{file} expires on {end:%Y-%m-%d}: renew it with `tokenloom certs`")
    return Finding("ok", "certificates", f"{file} is valid until {end:%Y-%m-%d}")
