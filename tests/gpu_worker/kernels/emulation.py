"""Builds kernels for instructions that this processor may lack: ``wider_vectors.h`` computes them in plain C++."""

import subprocess
from pathlib import Path

from tokenloom.gpu_worker.kernels import compiler

CSRC = Path(compiler.__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", "-w", "-Wno-psabi", "-march=haswell")


def build_emulated(source: str, folder: Path, *macros: str) -> Path:
    """Build ``csrc/<source>.cpp`` for AVX-512 with the extensions that ``macros`` name, such as ``WITH_VNNI``."""
    path = folder / f"{source}.so"
    defined = [f"-D{macro}" for macro in macros]
    header = Path(__file__).with_name("wider_vectors.h")
    subprocess.run(["g++", *FLAGS, *defined, "-include", header, CSRC / f"{source}.cpp", "-o", path], check=True)
    return path
