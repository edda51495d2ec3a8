"""Kernels that were built ahead, for each level of processors: ``prebuilt/LEVEL/NAME-DIGEST.so``.

The digest is that of the sources and of the compiler's flags, so a library of other sources is never loaded. The
libraries name no OpenMP library: they use the one that is loaded.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tokenloom.process.fall_backs import OF_PROCESS

from .levels import Level


def openmp_runtime() -> Path | None:
    """Return the OpenMP library that torch has loaded."""
    maps = Path("/proc/self/maps")
    return openmp_in(os.fsdecode(maps.read_bytes())) if maps.exists() else None


def openmp_in(maps: str) -> Path | None:
    """Return the OpenMP library among the files that a process has mapped, as ``/proc/PID/maps`` lists them."""
    # The path is the sixth column, and the last one: it may hold blanks.
    columns = [line.split(maxsplit=5) for line in maps.split("\n")]
    paths = {each[5] for each in columns if len(each) == 6 and each[5].rpartition("/")[2].startswith("libgomp")}
    return next((Path(path) for path in sorted(paths)), None)


@functools.cache
def expose_openmp() -> None:
    """Let libraries that name no OpenMP library use the one of the process. Raises ``OSError`` if there is none."""
    ctypes.CDLL(str(openmp_runtime() or "libgomp.so.1"), mode=ctypes.RTLD_GLOBAL)


FOLDER = Path(__file__).with_name("prebuilt")
SOURCES = Path(__file__).with_name("csrc")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
"""What every build of a kernel has, ahead or at first use."""

_HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)
_SOFTCAP_HEAD_SIZES = (64, 128, 256)
"""Of Gemma 2, and of models with attention sinks."""
_PRODUCTS = ("int8", "quantized", "float8", "bfloat16", "bfloat16_dots", "bfloat16_tiles", "floats")
_OTHERS = (*_PRODUCTS, "fused", "drafts", "replay", "batch", "draw", "lora", "pool", "states", "sums", "placement")
WITHOUT_OPENMP = ("placement",)
"""Sources that use no OpenMP: their processes have no other kernels, and may have no such library."""

Variant = tuple[str, dict[str, int]]
"""The name of a source, and the macros with which it is compiled."""


def variants() -> Iterator[Variant]:
    """Yield what is built ahead for each level: attention for the head sizes of usual models, and everything else."""
    for source in _OTHERS:
        yield source, {}
    for head_size in _HEAD_SIZES:
        yield "attention", {"HEAD_SIZE": head_size}
        yield "attention", {"HEAD_SIZE": head_size, "KV_INT8": 1}
    yield "latent", {"RANK": 512, "WIDTH": 576}  # DeepSeek, Kimi
    for head_size in _SOFTCAP_HEAD_SIZES:
        yield "attention", {"HEAD_SIZE": head_size, "SOFTCAP": 1}


# Compiling at the first start needs a compiler and 12 s of CPU, again in each new container. The name holds a digest of
# sources and flags, so that a library of another version is never taken.
def find_prebuilt(
    source: str, macros: Mapping[str, int], levels: Iterable[Level], folder: Path | None = None
) -> Path | None:
    """Return the library for the first of these levels that has it; None: it was not built ahead."""
    folder = folder or FOLDER
    for level in levels if folder.is_dir() else ():
        library = folder / level.name / library_name(source, macros, level)
        if library.is_file():
            return library if source in WITHOUT_OPENMP or _can_share_openmp() else None
    return None


def library_name(source: str, macros: Mapping[str, int], level: Level) -> str:
    """Return the file name of a library, such as ``attention-HEAD_SIZE64-0123456789abcdef.so``."""
    named = [f"{name}{value}" for name, value in sorted(macros.items())]
    identity = "\0".join([*FLAGS, *level.flags, *named, _contents(source)])
    return "-".join([source, *named, hashlib.sha256(identity.encode()).hexdigest()[:16]]) + ".so"


@functools.cache
def _contents(source: str) -> str:
    paths = (SOURCES / f"{source}.cpp", *sorted(SOURCES.glob("*.h")))
    return "\0".join(path.read_text(encoding="utf-8") for path in paths)


def _can_share_openmp() -> bool:
    try:
        expose_openmp()
    except OSError as error:
        OF_PROCESS.add("slow_kernels", f"those that were built ahead need an OpenMP library: {error}")
        return False
    return True
