"""Divides the machine's cores among the engines, because two engines on one core slow each other down."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CORES_PER_FREE_ONE = 8
"""Of so many cores, engines leave one to the other parts of the mesh, the kernel's network threads and other programs:
threads of an engine wait for each other, so the one that shares its core slows all of them down."""


@dataclass(frozen=True)
class Share:
    """The cores and threads of one engine."""

    cpus: tuple[int, ...]
    """The cores that it is bound to; empty: not bound."""
    threads: int
    """Compute threads, at least 1."""


def siblings(cpu: int, root: Path = Path("/sys/devices/system/cpu")) -> str:
    """Return what names the hardware threads of this one's core, as ``0,16``; its own number if the system does not."""
    try:
        return (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def divide(
    engines: int, available: list[int] | None = None, siblings_of: Callable[[int], str] = siblings
) -> list[Share]:
    """Return a share for each engine; sizes differ by at most one core, and no two have threads of the same core.

    From 8 cores on, one of 8 is left to the other parts. With too few cores, no engine is bound. A lone engine is not
    bound either: its threads, of which there are fewer than cores, move away from a busy core.
    """
    cpus = sorted(os.sched_getaffinity(0)) if available is None else available
    by_name: dict[str, list[int]] = {}
    for cpu in cpus:
        by_name.setdefault(siblings_of(cpu), []).append(cpu)
    # Whole cores with all of their hardware threads: neighbouring numbers may be the two threads of one core, and
    # engines bound to them would share it.
    cores = list(by_name.values())
    if len(cores) < engines:
        return [Share((), 1)] * engines
    left = min(len(cores) // _CORES_PER_FREE_ONE, len(cores) - engines)
    cores = cores[left:]  # the first ones are those that interrupt handlers use most
    bounds = [i * len(cores) // engines for i in range(engines + 1)]
    shares = [tuple(itertools.chain(*cores[a:b])) for a, b in itertools.pairwise(bounds)]
    return [Share(share if engines > 1 else (), len(share)) for share in shares]
