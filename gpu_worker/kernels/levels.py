"""The levels of processors for which kernels are built ahead, and which of them this machine has."""

import functools
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")


@dataclass(frozen=True)
class Level:
    """One kind of processor."""

    name: str
    """Of its folder among the kernels that are built ahead."""
    machine: str
    """As ``platform.machine`` names it."""
    flags: tuple[str, ...]
    """What the compiler may use."""
    needed: frozenset[str]
    """The processor's features, as Linux names them, that the code then needs."""


def _level(name: str, machine: str, flags: str, *needed: str) -> Level:
    return Level(name, machine, tuple(flags.split()), frozenset(needed))


LEVELS = (
    _level(
        "x86-64-amx",
        "x86_64",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
        *(*_AVX2, *_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    _level(
        "x86-64-v4-bf16",
        "x86_64",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16",
        *(*_AVX2, *_AVX512, "avx512_bf16"),
    ),
    _level("x86-64-v4", "x86_64", "-march=x86-64-v4 -mavx512vnni", *_AVX2, *_AVX512),
    _level("x86-64-v3", "x86_64", "-march=x86-64-v3", *_AVX2),
    _level("aarch64", "aarch64", "-march=armv8-a"),
)
"""Best first: AMX of Xeon from Sapphire Rapids on; AVX-512 with bfloat16 (EPYC from Zen 4 on); AVX-512 with VNNI (Xeon
from Cascade Lake on); AVX2; any 64-bit Arm processor."""


def available_levels(
    machine: str | None = None, features: Collection[str] | None = None, levels: Collection[Level] = LEVELS
) -> list[Level]:
    """Return the levels of a machine, best first; by default of this one."""
    machine = machine or platform.machine()
    features = processor_features() if features is None else features
    return [each for each in levels if each.machine == machine and each.needed <= set(features)]


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the features that Linux lets programs use; elsewhere none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())
