"""Gathers the engines that requests ask for, and remembers them until one of them changes. Finds which engines of a
pool an output processor works with, until the pools change. No I/O."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import InvalidArgument, Unavailable, WeightsReplaced
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.services.runtime.placement.engine_columns import EngineColumns, Rows
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds, is_of_engine, names_numerics
from tokenloom.services.runtime.placement.pairing import missing_role
from tokenloom.services.runtime.placement.pool import Pool, has_rank, make_pool
from tokenloom.v1.coordinator_pb2 import PickRequest, Subset
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .engine_record import EngineRecord
from .wanted_adapters import WantedAdapters

UNLIKE_SECONDS = 60.0
"""After so long without a request that continued on an engine that computes in another way, none is expected."""
_MAX_POOLS = 64
_Key: TypeAlias = "tuple[bytes, EngineRole, bytes, int | None]"


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


class EnginePools:
    """Keeps the serving engines by the fingerprint, role, adapter and rank that requests ask for.

    Nearly all requests ask for the same.

    Args:
        by_row: The joined engines, which the registry keeps up to date.
        clock: Monotonic seconds.
        fall_backs: Where it is noted that a role is missing, or engines compute in different ways.
        mixes_numerics: Whether requests go on between engines of ours and servers of others.
    """

    def __init__(
        self,
        columns: EngineColumns,
        kinds: FingerprintKinds,
        by_row: Mapping[int, EngineRecord],
        adapters: WantedAdapters,
        clock: Callable[[], float],
        fall_backs: FallBacks,
        *,
        mixes_numerics: bool = False,
    ) -> None:
        self._mixes_numerics = mixes_numerics
        self._columns = columns
        self._kinds = kinds
        self._by_row = by_row
        self._adapters = adapters
        self._clock = clock
        self._fall_backs = fall_backs
        self._pools: dict[_Key, Pool] = {}
        self._unlike: dict[_Key, str] = {}  # those whose engines compute in another way than was asked for, and which
        self._unlike_at = 0.0  # when one was last found
        self._subsets = EngineSubsets()
        self._alone: dict[tuple[_Key, str], Pool | None] = {}  # engines by their names, each as a pool of its own

    def clear(self) -> None:
        """Forget all, because an engine joined, left, or changed its state or role."""
        self._pools.clear()
        self._unlike.clear()
        self._subsets.clear()
        self._alone.clear()

    def refresh(self, now: float) -> None:
        """Notice that no request goes on any more where it is computed in another way."""
        if now - self._unlike_at > UNLIKE_SECONDS:
            self._fall_backs.end("other_numerics")

    def find(self, request: PickRequest, *, is_complete: bool) -> tuple[Pool, Pool | None]:
        """Return the engines that serve what a request asks for, and those of them that its output processor works
        with; None: all of them are equal to it.

        ``is_complete``: whether all engines have joined. Raises ``InvalidArgument`` for a rank or a subset that cannot
        be, ``ModelNotFound`` for an adapter that was unloaded, ``Unavailable`` if no engine has it yet,
        ``WeightsReplaced`` for weights that an operator has replaced in all engines.
        """
        rank = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        key = request.fingerprint.SerializeToString(), request.role, request.adapter, rank
        if (pool := self._pools.get(key)) is None:
            pool = self._pools[key] = self._gather(key, request, is_complete=is_complete)
        if key in self._unlike:
            self._unlike_at = self._clock()
            self._fall_backs.begin("other_numerics", self._unlike[key])
        return pool, self._near(key, pool, request)

    def _near(self, key: _Key, pool: Pool, request: PickRequest) -> Pool | None:
        """Return the engine that the request prefers, or the engines of the pool that the output processor works with;
        None: all of them are equal to it."""
        if request.query_id:
            return None
        preferred = self._find_alone(key, pool, request.preferred_engine) if request.preferred_engine else None
        if preferred is not None:
            return preferred
        if not request.HasField("subset"):
            return None

        def engines() -> list[Engine]:
            records = (self._by_row[row] for row in pool.rows)
            return [(record.identity.engine_id, record.report.role) for record in records]

        def make(numbers: list[int]) -> Pool:
            return make_pool(self._columns, self._kinds, np.sort(pool.rows[numbers]))

        return self._subsets.find(key, engines, make, request.subset)

    def _find_alone(self, key: _Key, pool: Pool, name: str) -> Pool | None:
        """Return the engine of this name as a pool; None: it is not in ``pool``, or does not compute whole requests."""
        if (key, name) not in self._alone:
            if len(self._alone) >= _MAX_SUBSETS:
                self._alone.clear()
            rows = [row for row in pool.rows.tolist() if _is_whole(self._by_row[row], name)]
            self._alone[key, name] = make_pool(self._columns, self._kinds, np.array(rows, np.intp)) if rows else None
        return self._alone[key, name]

    def _gather(self, key: _Key, request: PickRequest, *, is_complete: bool) -> Pool:
        """Return the serving engines of the pool that a request asks for, and that have its adapter. If none has it,
        ask one to load it and raise."""
        if len(self._pools) >= _MAX_POOLS:
            self.clear()
        self._warn_of_missing_role()
        rows = self._columns.serving(self._kinds.of_pool(request.fingerprint, request.role))
        if not request.fingerprint.weights and not is_of_engine(request.fingerprint):
            rows = self._not_aside(rows)
        if names_numerics(request.fingerprint):
            rows = self._computing_alike(key, rows, request.fingerprint)
        if not len(rows) and is_complete and self._are_replaced(request.fingerprint):
            # An engine that comes back loads the new ones: the request would wait until its deadline.
            raise WeightsReplaced("No engine has the weights any more with which the answer began; send it again.")
        if request.HasField("data_parallel_rank"):
            rows = self._of_rank(rows, request.data_parallel_rank)
        if request.adapter:
            rows = self._having(rows, request.adapter, is_complete=is_complete)
        return make_pool(self._columns, self._kinds, rows)

    def _are_replaced(self, asked: Fingerprint) -> bool:
        """Return whether all engines of a model have other weights than these, because an operator wants that."""
        records = [each for each in self._by_row.values() if each.identity.fingerprint.model == asked.model]
        return bool(asked.weights and records) and all(
            each.weights_version and not each.lacks_weights and each.identity.fingerprint.weights != asked.weights
            for each in records
        )

    def _not_aside(self, rows: Rows) -> Rows:
        """Return the engines whose weights serve the model's name."""
        return np.array([row for row in rows.tolist() if not self._by_row[row].is_aside], np.intp)

    def _computing_alike(self, key: _Key, rows: Rows, wanted: Fingerprint) -> Rows:
        """Return the engines that compute as the one on which the request began; without any, all of them, or all of
        the same maker. Raises ``Unavailable`` if there are only others."""
        kinds = self._columns.kind[rows]
        alike = rows[self._kinds.computing_as(wanted)[kinds]]
        if len(alike) or not len(rows):
            return alike
        if not self._mixes_numerics:
            rows = rows[self._kinds.of_same_maker(wanted)[kinds]]
            if not len(rows):
                raise Unavailable("No engine is serving that computes as the one on which the request began; retry.")
        names = ", ".join(sorted({self._by_row[row].identity.fingerprint.numerics for row in rows.tolist()}))
        self._unlike[key] = f"it began with {wanted.numerics!r}; now serving: {names}"
        return rows

    def _of_rank(self, rows: Rows, rank: int) -> Rows:
        """Return the engines with this number in their group. Raises ``InvalidArgument`` if no group has so many,
        ``Unavailable`` while no member of a group knows how many there are."""
        size = max((record.report.group_size for record in self._by_row.values()), default=0)
        if not size and any(record.identity.data_parallel_group for record in self._by_row.values()):
            raise Unavailable("The ranks of the data-parallel group are still joining it; retry.")
        if rank >= size:
            ranks = f"there are {size} ranks, from 0 on" if size else "no engine belongs to a data-parallel group"
            raise InvalidArgument(f"data_parallel_rank {rank} does not exist: {ranks}", "data_parallel_rank")
        return np.array([row for row in rows if has_rank(self._by_row[row].identity, rank)], np.intp)

    def _having(self, rows: Rows, adapter: bytes, *, is_complete: bool) -> Rows:
        having = np.array([row for row in rows if adapter in self._by_row[row].adapters], np.intp)
        if len(having):
            return having
        if not is_complete:
            raise Unavailable("Engines are still joining the coordinator; retry.")
        raise self._adapters.request([self._by_row[row] for row in rows], adapter, self._clock())

    def _warn_of_missing_role(self) -> None:
        """Note when requests begin to do without engines of a role, and when they do not any more."""
        columns = self._columns
        # Not np.unique: its first call imports numpy.ma, 30 ms of the first request.
        missing = missing_role(columns.role[columns.is_serving].tolist())
        if missing is None:
            self._fall_backs.end("missing_role")
        else:
            name = EngineRole.Name(missing).removeprefix("ENGINE_ROLE_").lower()
            self._fall_backs.begin("missing_role", f"no {name} engine is serving")


def _is_whole(record: EngineRecord, name: str) -> bool:
    """Return whether an engine has this name and computes whole requests: as a pool of its own, one that only prefills
    would find none to hand its KV to."""
    return record.identity.engine_id == name and record.report.role == EngineRole.ENGINE_ROLE_BOTH
