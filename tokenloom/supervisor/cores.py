"""Divides the machine's cores among the engines, because two engines on one core slow each other down."""

import itertools
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """The cores and threads of one engine."""

    cpus: tuple[int, ...]
    """The cores that it is bound to; empty: not bound."""
    threads: int
    """Compute threads, at least 1."""


def divide(engines: int, available: list[int] | None = None) -> list[Share]:
    """Return a share for each engine; sizes differ by at most one core. With too few cores, none is bound."""
    cpus = sorted(os.sched_getaffinity(0)) if available is None else available
    if engines == 1:
        return [Share((), len(cpus))]
    if len(cpus) < engines:
        return [Share((), 1)] * engines
    bounds = [i * len(cpus) // engines for i in range(engines + 1)]
    return [Share(tuple(cpus[a:b]), b - a) for a, b in itertools.pairwise(bounds)]
