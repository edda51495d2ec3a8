"""Lets this process compute with libraries of kernels that a test has built."""

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import openmp_runtime
from tokenloom.gpu_worker.kernels.prebuilt import FLAGS, SOURCES


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
    """Return a function for :func:`use_builds` that compiles with ``flags`` behind those of every build, once each."""

    @functools.cache
    def compile_once(source: str, macros: tuple[tuple[str, int], ...]) -> Path:
        name = "-".join([source, *(f"{macro}{value}" for macro, value in macros)])
        path = folder / f"{name}.so"
        defined = [f"-D{macro}={value}" for macro, value in macros]
        runtime = openmp_runtime()
        linked = ["-fopenmp"] if runtime is None else ["-fopenmp", str(runtime)]
        command = [compiler, *FLAGS, *flags, *defined, "-shared", str(SOURCES / f"{source}.cpp"), "-o", str(path)]
        subprocess.run([*command, *linked], check=True)
        return path

    def build(source: str, march: str = "native", cache_dir: Path | None = None, **macros: int) -> Path:
        return compile_once(source, tuple(sorted(macros.items())))

    return build
