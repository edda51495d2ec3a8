"""Lets this process compute with libraries of kernels that a test has built."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.prebuilt import FLAGS, SOURCES, openmp_runtime


def use_builds(patch: pytest.MonkeyPatch, build: Callable[..., Path]) -> None:
    """Replace what compiles and finds libraries by ``build`` (source, march, cache_dir, **macros), in all modules."""
    patch.setattr(library, "build", build)
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("tokenloom.gpu_worker")]
    for name, load in [*vars(library).items()]:
        if not name.startswith("load_") or not hasattr(load, "__wrapped__"):
            continue
        fresh = functools.cache(load.__wrapped__)
        for module in modules:
            if vars(module).get(name) is load:
                patch.setattr(module, name, fresh)


def builder(folder: Path, flags: Sequence[str], compiler: str = "g++") -> Callable[..., Path]:
    """Return a function for :func:`use_builds` that compiles with ``flags`` behind those of every build, unless the
    folder has the library: its name holds a digest of sources, flags and compiler."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout

    @functools.cache
    def compile_once(source: str, macros: tuple[tuple[str, int], ...]) -> Path:
        defined = [f"-D{macro}={value}" for macro, value in macros]
        runtime = openmp_runtime()
        command = [compiler, *FLAGS, *flags, *defined, "-shared", "-fopenmp"]
        paths = (SOURCES / f"{source}.cpp", *sorted(SOURCES.glob("*.h")))
        contents = [path.read_text(encoding="utf-8") for path in paths]
        identity = "\0".join([version, runtime.name if runtime is not None else "", *command, *contents])
        name = "-".join(
            [source, *(f"{macro}{value}" for macro, value in macros), sha256(identity.encode()).hexdigest()[:16]]
        )
        path = folder / f"{name}.so"
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            linked = [] if runtime is None else [str(runtime)]
            subprocess.run([*command, str(paths[0]), "-o", str(unfinished), *linked], check=True, env=_unwatched())
            unfinished.replace(path)  # in one step: another process may be about to load it
        return path

    def build(source: str, march: str = "native", cache_dir: Path | None = None, **macros: int) -> Path:
        return compile_once(source, tuple(sorted(macros.items())))

    return build


def _unwatched() -> dict[str, str]:
    """Return the environment without a sanitizer, which would watch the compiler and slow it down too."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
