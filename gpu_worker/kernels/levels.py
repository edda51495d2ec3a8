"""The levels of processors for which kernels are built ahead, which of them this machine has, and which may be used."""

import functools
import os
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
    onednn: str
    """The instructions that oneDNN may use, as its ``ONEDNN_MAX_CPU_ISA`` names them."""


def _level(name: str, machine: str, onednn: str, flags: str, *needed: str) -> Level:
    return Level(name, machine, tuple(flags.split()), frozenset(needed), onednn)


# Levels instead of processors: their libraries make one small wheel for every platform. What the best level of a
# machine lacks is compiled there, or without a compiler taken from a lower level.
LEVELS = (
    _level(
        "x86-64-amx",
        "x86_64",
        "DEFAULT",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
        *(*_AVX2, *_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    _level(
        "x86-64-v4-bf16",
        "x86_64",
        "AVX512_CORE_BF16",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16",
        *(*_AVX2, *_AVX512, "avx512_bf16"),
    ),
    _level("x86-64-v4", "x86_64", "AVX512_CORE_VNNI", "-march=x86-64-v4 -mavx512vnni", *_AVX2, *_AVX512),
    _level("x86-64-v3-vnni", "x86_64", "AVX2_VNNI", "-march=x86-64-v3 -mavxvnni", *_AVX2, "avx_vnni"),
    _level("x86-64-v3", "x86_64", "AVX2", "-march=x86-64-v3", *_AVX2),
    _level("aarch64", "aarch64", "DEFAULT", "-march=armv8-a"),
)
"""Best first: AMX of Xeon from Sapphire Rapids on; AVX-512 with bfloat16 (EPYC from Zen 4 on); AVX-512 with VNNI (Xeon
from Cascade Lake on); AVX2 with VNNI (Core from Alder Lake on); AVX2; any 64-bit Arm processor."""


@dataclass
class _Use:
    """Holds which levels this process may use."""

    limit: Level | None = None
    begun: bool = False
    """Whether kernels were asked for, so that the limit cannot change any more."""


_use = _Use()


def limit_level(name: str) -> None:
    """Make this process compute as a processor of the level ``name``, before it asks for kernels or uses oneDNN.

    Raises ``ValueError`` if this processor lacks the level, or if the process already computes at another one.
    """
    names = [level.name for level in LEVELS]
    chosen = LEVELS[names.index(name)]
    if chosen == _use.limit:
        return
    if _use.begun or _use.limit is not None:
        raise ValueError(f"processor_level: {name} cannot be set, because this process already uses another level")
    if chosen not in available_levels(features=_found_features()):
        raise ValueError(f"processor_level: this processor lacks instructions of {name}")
    os.environ["ONEDNN_MAX_CPU_ISA"] = chosen.onednn
    _use.limit = chosen


def native_flags() -> tuple[str, ...]:
    """Return the compiler's flags for this processor, or for the level that it is limited to."""
    _use.begun = True
    return ("-march=native",) if _use.limit is None else _use.limit.flags


def available_levels(
    machine: str | None = None, features: Collection[str] | None = None, levels: Collection[Level] = LEVELS
) -> list[Level]:
    """Return the levels of a machine, best first; by default those that this process may use."""
    machine = machine or platform.machine()
    features = processor_features() if features is None else features
    return [each for each in levels if each.machine == machine and each.needed <= set(features)]


def processor_features() -> frozenset[str]:
    """Return the features that this process may use."""
    return _found_features() if _use.limit is None else _use.limit.needed


@functools.cache
def _found_features() -> frozenset[str]:
    """Return the features that Linux lets programs use; elsewhere none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())
