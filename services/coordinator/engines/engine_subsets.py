"""Finds which engines of a pool an output processor works with, and remembers it until the pools change. No I/O."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.services.runtime.placement.pool import Pool
from tokenloom.v1.coordinator_pb2 import Subset
from tokenloom.v1.types_pb2 import EngineRole

Engine: TypeAlias = tuple[str, EngineRole]
"""Its name, and what it does: a subset has engines of each role."""

_MAX_SUBSETS = 1 << 14
"""Remembered at most: one for each output processor and pool, so that a large mesh computes none twice."""


class EngineSubsets:
    """Computes subsets from the names of engines. One engine's restart therefore moves none."""

    def __init__(self) -> None:
        self._rings: dict[Hashable, list[list[int]]] = {}  # as many as there are pools
        self._found: dict[tuple[Hashable, int, int, int], Pool | None] = {}

    def clear(self) -> None:
        """Forget all, because an engine joined, left, or changed its state or role."""
        self._rings.clear()
        self._found.clear()

    def find(
        self,
        pool: Hashable,
        engines: Callable[[], Sequence[Engine]],
        make: Callable[[list[int]], Pool],
        wanted: Subset,
    ) -> Pool | None:
        """Return the engines of a pool that are in a subset; None: all of them are.

        Args:
            pool: Names the pool.
            engines: Returns its engines, in their order; called once for each pool.
            make: Returns the pool of the engines with these numbers; called once for each subset.

        Raises ``InvalidArgument`` for a subset that no output processor can have.
        """
        key = (pool, wanted.index, wanted.count, wanted.size)
        if key not in self._found:
            _check(wanted)
            if len(self._found) >= _MAX_SUBSETS:
                self._found.clear()
            if (rings := self._rings.get(pool)) is None:
                rings = self._rings[pool] = subset.rings(engines())
            found = subset.of_rings(rings, ReplicaPosition(wanted.index, wanted.count), wanted.size)
            self._found[key] = make(found) if len(found) < sum(map(len, rings)) else None
        return self._found[key]


def _check(wanted: Subset) -> None:
    if wanted.index >= wanted.count:
        raise InvalidArgument(f"subset.index {wanted.index} is not below subset.count, {wanted.count}", "subset.index")
    if not wanted.size:
        raise InvalidArgument("subset.size must be at least 1", "subset.size")
