"""Places requests while the coordinator is away: by its last snapshot and the picks made since. No I/O."""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from tokenloom.request import errors
from tokenloom.services.runtime.peers import pairing, subset
from tokenloom.services.runtime.peers.hello import fingerprint_difference
from tokenloom.services.runtime.peers.subset import Position
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineState,
    PickRequest,
    PickResponse,
    Snapshot,
    Subset,
)
from tokenloom.v1.types_pb2 import Fingerprint

_WAITING_WEIGHT = 4  # what one waiting request adds to a score


class EngineKey(NamedTuple):
    """Names an incarnation of an engine."""

    engine_id: str
    epoch: int


class LastSnapshot:
    """Keeps the newest complete view of the engines that serve the same model as this process."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self._entries: list[EngineEntry] = []
        self._serving: frozenset[EngineKey] = frozenset()
        self._pd_threshold = 0
        self._epoch = 0
        self._complete = False
        self._picks: Counter[EngineKey] = Counter()  # since the snapshot, and still live
        self._turn = 0
        self._rings: list[list[int]] | None = None  # of the serving engines, once a pick needs them

    def update(self, snapshot: Snapshot) -> bool:
        """Take a new snapshot. While engines still re-join a new coordinator, the snapshot of the former one stays.

        Returns whether an engine serves that did not serve before.
        """
        is_new_coordinator = snapshot.coordinator_epoch != self._epoch
        if self._entries and not snapshot.complete and (self._complete or is_new_coordinator):
            return False
        self._epoch = snapshot.coordinator_epoch
        self._complete = snapshot.complete
        self._entries = [entry for entry in snapshot.engines if self._is_ours(entry)]
        self._pd_threshold = snapshot.pd_threshold
        self._picks.clear()
        self._rings = None
        before, self._serving = self._serving, frozenset(map(_key, filter(_is_serving, self._entries)))
        return not self._serving <= before

    def pick(self, request: PickRequest, exclude: Collection[EngineKey] = ()) -> PickResponse:
        """Answer like the coordinator, by its rule, but without a pick's id: the serving engine of the lowest score, of
        the request's subset if it names one that has an engine left.

        Ties rotate. The pick counts until the next snapshot or ``release``. Cached prefixes are not considered: only
        the coordinator knows them. Raises ``Unavailable`` when no engine serves, or none has the request's adapter.
        """
        count = len(self._entries)
        candidates = [
            pairing.Candidate(
                engine=index,
                role=entry.report.role,
                fingerprint=entry.identity.fingerprint,
                rank=(self._score(entry), (index - self._turn) % count),
                uncached_tokens=request.prompt_tokens,
            )
            for index, entry in enumerate(self._entries)
            if _is_candidate(entry, request, exclude)
        ]
        if not candidates:
            raise errors.Unavailable("No engine is serving this model now; retry.")
        if request.HasField("subset") and not request.query_id:
            near = self._near(request.subset)
            candidates = [each for each in candidates if each.engine in near] or candidates
        if request.query_id:
            candidates = [self._of_query(candidates, request.query_id)]
        index, whole = pairing.choose(candidates, request.role, 0 if request.pools else self._pd_threshold)
        self._turn = index + 1
        chosen = self._entries[index]
        self.count(_key(chosen))
        return PickResponse(engine=chosen.identity, whole_request=whole)

    def _near(self, wanted: Subset) -> frozenset[int]:
        """Return the numbers of the serving engines in a subset."""
        if self._rings is None:
            serving = [number for number, entry in enumerate(self._entries) if _is_serving(entry)]
            named = [
                (self._entries[number].identity.engine_id, self._entries[number].report.role) for number in serving
            ]
            self._rings = [[serving[each] for each in ring] for ring in subset.rings(named)]
        return frozenset(subset.of_rings(self._rings, Position(wanted.index, wanted.count), wanted.size))

    def _of_query(self, candidates: list[pairing.Candidate[int]], query_id: str) -> pairing.Candidate[int]:
        names = [(*_key(self._entries[each.engine]), each.role) for each in candidates]
        return pairing.engine_of_query(candidates, names, query_id)

    def num_requests(self, key: EngineKey) -> int:
        """Return how many requests an engine last reported; 0 for an engine that is not in the snapshot."""
        reports = (entry.report for entry in self._entries if _key(entry) == key)
        return sum(report.running + report.waiting for report in reports)

    def count(self, key: EngineKey) -> None:
        """Count one more leg that was placed on an engine."""
        self._picks[key] += 1

    def release(self, key: EngineKey) -> None:
        """Forget a leg that was counted and has ended."""
        if self._picks[key] > 0:
            self._picks[key] -= 1

    def _score(self, entry: EngineEntry) -> int:
        return entry.score + _WAITING_WEIGHT * self._picks[_key(entry)]

    def _is_ours(self, entry: EngineEntry) -> bool:
        return fingerprint_difference(self._fingerprint, entry.identity.fingerprint) is None


def _is_candidate(entry: EngineEntry, request: PickRequest, exclude: Collection[EngineKey]) -> bool:
    return (
        _is_serving(entry)
        and _key(entry) not in exclude
        and pairing.in_pool(request.fingerprint, entry.identity.fingerprint, request.role)
        and (not request.adapter or any(each.digest == request.adapter for each in entry.report.adapters))
    )


def _is_serving(entry: EngineEntry) -> bool:
    return entry.report.state == EngineState.ENGINE_STATE_SERVING


def _key(entry: EngineEntry) -> EngineKey:
    return EngineKey(entry.identity.engine_id, entry.identity.epoch)
