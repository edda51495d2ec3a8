"""Builds kernels for instructions that this processor may lack: ``wider_vectors.h`` computes them in plain C++, and
``matrix_unit.h`` those of the matrix unit."""

import subprocess
from pathlib import Path

from tokenloom.gpu_worker.kernels import compiler

HERE = Path(__file__).parent
CSRC = Path(compiler.__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp", "-w", "-Wno-psabi", "-march=haswell")


def build_emulated(source: str, folder: Path, *macros: str, header: str = "wider_vectors.h") -> Path:
    """Build ``csrc/<source>.cpp`` for AVX-512 with the extensions that ``macros`` name, such as ``WITH_VNNI``."""
    path = folder / f"{source}.so"
    defined = [f"-D{macro}" for macro in macros]
    subprocess.run(["g++", *FLAGS, *defined, "-include", HERE / header, CSRC / f"{source}.cpp", "-o", path], check=True)
    return path
