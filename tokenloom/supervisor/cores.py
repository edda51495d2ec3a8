"""Divides the machine's cores among the engines: two engines on one core slow each other down."""

import itertools
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What one engine gets."""

    cpus: tuple[int, ...]
    """The cores it is bound to; empty: not bound."""
    threads: int
    """Compute threads, at least 1."""


def divide(engines: int, available: list[int] | None = None) -> list[Share]:
    """A share for each engine; sizes differ by one core at most. With fewer cores than engines, nobody is bound."""
    cpus = sorted(os.sched_getaffinity(0)) if available is None else available
    if engines == 1:
        return [Share((), len(cpus))]
    if len(cpus) < engines:
        return [Share((), 1)] * engines
    bounds = [i * len(cpus) // engines for i in range(engines + 1)]
    return [Share(tuple(cpus[a:b]), b - a) for a, b in itertools.pairwise(bounds)]
