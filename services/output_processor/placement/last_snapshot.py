"""Places requests while the coordinator is away: by its last snapshot and the picks made since. No I/O."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import exp
from typing import NamedTuple

import numpy as np

from tokenloom.request import errors
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.hello import fingerprint_difference, is_foreign
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.services.runtime.placement import pairing, prefix_homes
from tokenloom.services.runtime.placement.engine_columns import EngineColumns, Rows
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds, names_numerics
from tokenloom.services.runtime.placement.pool import has_rank, make_pool
from tokenloom.services.runtime.placement.prefix_homes import name_hash
from tokenloom.services.runtime.placement.rules import WAITING_WEIGHT, Ask, Rule, load_score
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineIdentity,
    EngineState,
    PickRequest,
    PickResponse,
    Subset,
)
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

FADE_SECONDS = 2.0
"""After so long the loads of the last snapshot count for 1/e. All output processors have the same ones and would send
their requests to the same engine, long after it has ceased to be the idle one."""
_BOTH, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_DECODE
_KEY_STEP, _KEY_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # the golden ratio: keys that never repeat (SplitMix64)
_ANY_ROOM = np.iinfo(np.int64).max


class EngineKey(NamedTuple):
    """Names an incarnation of an engine."""

    engine_id: str
    epoch: int


class LastSnapshot:
    """Keeps the newest complete view of the engines that serve the same model as this process."""

    def __init__(self, fingerprint: Fingerprint, clock: Callable[[], float], seed: int = 0) -> None:
        """Args:
        fingerprint: What this process serves.
        clock: Monotonic seconds.
        seed: Differs between processes, so that their requests without a prefix go different ways.
        """
        self._fingerprint = fingerprint
        self._clock = clock
        self._taken_at = clock()
        self._view = RegistryView()
        self._version = 0  # of the view, when the entries were taken from it
        self._entries: list[EngineEntry] = []
        self._columns = EngineColumns()  # the entries, without their loads
        self._own = self._loads = np.zeros(0)  # own live picks since the snapshot, and what it says; by row
        self._kinds = FingerprintKinds()
        self._rows: dict[EngineKey, int] = {}
        self._by_number: dict[int, int] = {}  # rows by the numbers of the engines
        self._serving: frozenset[EngineKey] = frozenset()
        self._pd_threshold = 0
        self._epoch = 0
        self._complete = False
        self._picks: Counter[EngineKey] = Counter()  # since the snapshot, and still live
        self._random_key = seed
        self._rings: list[list[int]] | None = None  # of the serving engines, once a pick needs them
        self._is_behind = False  # whether the columns lack loads that have arrived
        self._mixes_numerics = False
        self.had_own = False
        """Whether an engine has been here that does not compute by a server of others."""
        self.only_engine: EngineKey | None = None
        """The engine that every pick would choose, because it is the only one and serves all roles."""

    def update(self, snapshot: RegistryView) -> bool:
        """Take a view after a change. While engines still re-join a new coordinator, the view of the former one stays.

        Returns whether an engine serves that did not serve before.
        """
        if snapshot is self._view and snapshot.version == self._version:  # only loads changed
            self._taken_at = self._clock()
            self._is_behind = True
            self._picks.clear()
            return False
        is_new_coordinator = snapshot.coordinator_epoch != self._epoch
        if self._entries and not snapshot.complete and (self._complete or is_new_coordinator):
            return False
        self._view, self._version = snapshot, snapshot.version
        self._epoch = snapshot.coordinator_epoch
        self._complete = snapshot.complete
        self._taken_at = self._clock()
        self._entries = [entry for entry in snapshot.engines if self._is_ours(entry)]
        self._pd_threshold = snapshot.pd_threshold
        self._mixes_numerics = snapshot.mixes_numerics
        self.had_own |= any(not is_foreign(entry.identity.fingerprint.numerics) for entry in self._entries)
        self._is_behind = True
        self._picks.clear()
        self._rings = None
        before, self._serving = self._serving, frozenset(map(_key, filter(_is_serving, self._entries)))
        self.only_engine = _only(self._entries)
        return not self._serving <= before

    def pick(self, request: PickRequest, exclude: Collection[EngineKey] = ()) -> PickResponse:
        """Answer like the coordinator, but without a pick's id: with an engine of the request's subset if it names one
        that has an engine left.

        Other output processors place requests at the same time and do not see these picks. Therefore the prefix of the
        prompt names a few engines, the same everywhere: those that have it in their caches, where the coordinator has
        published them, or its homes. Own picks decide between them, with the loads of the last snapshot while it is
        young (:func:`...runtime.placement.prefix_homes.rule`). A request without a prefix draws its engines.

        The pick counts until the next snapshot or ``release``. Raises ``Unavailable`` when no engine serves, or none
        has the request's adapter.
        """
        self._look()
        rows = self._candidates(request, exclude)
        if not len(rows):
            raise errors.Unavailable("No engine is serving this model now; retry.")
        preferred = self._preferred(rows, request) if request.preferred_engine else rows[:0]
        if len(preferred):
            rows = preferred
        elif request.HasField("subset") and not request.query_id:
            near = rows[np.isin(rows, self._near(request.subset))]
            rows = near if len(near) else rows
        if request.query_id:
            rows = np.array([pairing.engine_of_query(self._columns, rows, request.query_id)], np.intp)
        pool = make_pool(self._columns, self._kinds, rows)
        threshold = 0 if request.pools else self._pd_threshold
        ask = Ask(request.role, request.prompt_tokens)
        row, whole = pairing.choose(self._columns, pool, ask, self._rule(request), threshold)
        chosen = self._entries[row]
        self.count(_key(chosen))
        return PickResponse(engine=chosen.identity, whole_request=whole)

    def named(self, request: PickRequest, engine_id: str) -> PickResponse:
        """Answer with the engine of this name, which counts as :meth:`pick` says. Raises ``Unavailable`` if it does not
        serve what the request asks for, or only prefills."""
        self._look()
        for row in self._candidates(request, ()).tolist():
            entry = self._entries[row]
            if entry.identity.engine_id == engine_id and entry.report.role != EngineRole.ENGINE_ROLE_PREFILL:
                self.count(_key(entry))
                return PickResponse(engine=entry.identity, whole_request=True)
        raise errors.Unavailable(f"No engine {engine_id} serves what this request needs.")

    def quiet(
        self, request: PickRequest, exclude: Collection[EngineKey], only: EngineKey | None = None
    ) -> EngineIdentity | None:
        """Return the engine with the fewest requests of those that compute exactly as the request names, on which none
        waits and half of the seats are free; None: there is none. ``only``: the one engine that may be it."""
        self._look()
        entries = [self._entries[row] for row in self._candidates(request, exclude).tolist()]
        numerics = request.fingerprint.numerics
        found = [
            each
            for each in entries
            if each.identity.fingerprint.numerics == numerics
            and only in (None, _key(each))
            and not _is_crowded(each)
            and 2 * each.report.running <= max(each.report.seats, 1)
        ]
        best = min(found, key=lambda each: (each.report.running, each.identity.engine_id), default=None)
        return None if best is None else best.identity

    def is_crowded(self, key: EngineKey) -> bool:
        """Return whether requests wait on an engine."""
        self._look()
        return any(_key(entry) == key and _is_crowded(entry) for entry in self._entries)

    def identity(self, key: EngineKey) -> EngineIdentity | None:
        """Return an incarnation of an engine; None: it is not in the snapshot."""
        return next((entry.identity for entry in self._entries if _key(entry) == key), None)

    def _preferred(self, rows: Rows, request: PickRequest) -> Rows:
        """Return the engine that a request prefers, if it is among ``rows`` and computes whole requests."""
        if request.query_id:
            return rows[:0]
        entries = (self._entries[row] for row in rows.tolist())
        found = (each.identity.engine_id == request.preferred_engine and each.report.role == _BOTH for each in entries)
        return rows[np.fromiter(found, np.bool_, len(rows))]

    def _near(self, wanted: Subset) -> list[int]:
        """Return the rows of the serving engines in a subset."""
        if self._rings is None:
            serving = [row for row, entry in enumerate(self._entries) if _is_serving(entry)]
            engines = [self._entries[row] for row in serving]
            rings = subset.rings([(each.identity.engine_id, each.report.role) for each in engines])
            self._rings = [[serving[each] for each in ring] for ring in rings]
        return subset.of_rings(self._rings, ReplicaPosition(wanted.index, wanted.count), wanted.size)

    def num_requests(self, key: EngineKey) -> int:
        """Return how many requests an engine last reported; 0 for an engine that is not in the snapshot."""
        self._view.update_loads()
        reports = (entry.report for entry in self._entries if _key(entry) == key)
        return sum(report.running + report.waiting for report in reports)

    def serves(self, key: EngineKey) -> Fingerprint | None:
        """Return what an incarnation of an engine serves; None for one that is not in the snapshot."""
        found = (entry.identity.fingerprint for entry in self._entries if _key(entry) == key)
        return next(found, None)

    def count(self, key: EngineKey) -> None:
        """Count one more leg that was placed on an engine."""
        self._picks[key] += 1
        self._add_waiting(key, 1)

    def release(self, key: EngineKey) -> None:
        """Forget a leg that was counted and has ended."""
        if self._picks[key] > 0:
            self._picks[key] -= 1
            self._add_waiting(key, -1)

    def _rule(self, request: PickRequest) -> Rule:
        """Return the rule for a leg. A decode leg saves no prefill, only a copy: it has no home."""
        keys = () if request.role == _DECODE else tuple(prefix_homes.keys_of(request.block_hash_prefixes))
        if not keys:
            self._random_key = (self._random_key + _KEY_STEP) & _KEY_BITS
            keys = (self._random_key,)
        fade = exp((self._taken_at - self._clock()) / FADE_SECONDS)
        return prefix_homes.rule(keys, fade * self._loads + WAITING_WEIGHT * self._own, self._holders(keys))

    def _holders(self, keys: Sequence[int]) -> Sequence[int]:
        """Return the rows of engines to which the coordinator sent prompts with this beginning: of the longest prefix
        that it has published."""
        for key in reversed(keys):
            if numbers := self._view.engines_of(key):
                return [self._by_number[number] for number in numbers if number in self._by_number]
        return ()

    def _look(self) -> None:
        """Write what has arrived since the last look to the columns. A process that the coordinator serves never looks,
        and spends nothing on the loads of a thousand engines."""
        if self._is_behind:
            self._is_behind = False
            self._view.update_loads()
            self._fill_columns()
            for key, requests in self._picks.items():
                self._add_waiting(key, requests)

    def _add_waiting(self, key: EngineKey, requests: int) -> None:
        if (row := self._rows.get(key)) is not None:
            self._own[row] += requests

    def _candidates(self, request: PickRequest, exclude: Collection[EngineKey]) -> Rows:
        rows = self._columns.serving(self._kinds.of_pool(request.fingerprint, request.role))
        if names_numerics(request.fingerprint):
            kinds = self._columns.kind[rows]
            alike = rows[self._kinds.computing_as(request.fingerprint)[kinds]]
            if not len(alike) and not self._mixes_numerics:
                rows = rows[self._kinds.of_same_maker(request.fingerprint)[kinds]]
            rows = alike if len(alike) else rows
        if request.adapter:
            rows = np.array([row for row in rows if _has_adapter(self._entries[row], request.adapter)], np.intp)
        if request.HasField("data_parallel_rank"):
            rank = request.data_parallel_rank
            rows = np.array([row for row in rows if has_rank(self._entries[row].identity, rank)], np.intp)
        excluded = [self._rows[key] for key in exclude if key in self._rows]
        return rows[~np.isin(rows, excluded)] if excluded else rows

    def _fill_columns(self) -> None:
        """Write the entries into new columns, whose rows are the positions of the entries. What was free when they were
        reported says nothing a few seconds later."""
        self._columns, self._kinds, self._rows = EngineColumns(), FingerprintKinds(), {}
        self._by_number = {entry.number: row for row, entry in enumerate(self._entries) if entry.number}
        for entry in self._entries:
            key, columns, row = _key(entry), self._columns, self._columns.add()
            self._rows[key] = row
            columns.kind[row] = self._kinds.number(entry.identity.fingerprint)
            columns.name_hash[row] = name_hash(f"{key.engine_id} {key.epoch}")
            columns.role[row] = entry.report.role
            columns.is_serving[row] = _is_serving(entry)
            columns.free_tokens[row] = _ANY_ROOM
        self._own, self._loads = np.zeros(self._columns.capacity), np.zeros(self._columns.capacity)
        for row, entry in enumerate(self._entries):
            self._loads[row] = load_score(entry.waiting, entry.report.running)

    def _is_ours(self, entry: EngineEntry) -> bool:
        return fingerprint_difference(self._fingerprint, entry.identity.fingerprint) is None


def _has_adapter(entry: EngineEntry, digest: bytes) -> bool:
    return any(each.digest == digest for each in entry.report.adapters)


def _is_serving(entry: EngineEntry) -> bool:
    return entry.report.state == EngineState.ENGINE_STATE_SERVING


def _is_crowded(entry: EngineEntry) -> bool:
    return bool(entry.waiting or entry.report.waiting)


def _only(entries: Sequence[EngineEntry]) -> EngineKey | None:
    match entries:
        case [entry] if _is_serving(entry) and entry.report.role == _BOTH:
            return _key(entry)
    return None


def _key(entry: EngineEntry) -> EngineKey:
    return EngineKey(entry.identity.engine_id, entry.identity.epoch)
