"""Places requests while the coordinator is away: by its last snapshot and the picks made since. No I/O."""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from tokenloom.request import errors
from tokenloom.services.runtime.peers import pairing
from tokenloom.services.runtime.peers.hello import fingerprint_difference
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineState,
    PickRequest,
    PickResponse,
    Snapshot,
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
        self._pd_threshold = 0
        self._epoch = 0
        self._complete = False
        self._picks: Counter[EngineKey] = Counter()  # since the snapshot, and still live
        self._turn = 0

    def update(self, snapshot: Snapshot) -> None:
        """Take a new snapshot. While engines still re-join a new coordinator, the snapshot of the former one stays."""
        is_new_coordinator = snapshot.coordinator_epoch != self._epoch
        if self._entries and not snapshot.complete and (self._complete or is_new_coordinator):
            return
        self._epoch = snapshot.coordinator_epoch
        self._complete = snapshot.complete
        self._entries = [entry for entry in snapshot.engines if self._is_ours(entry)]
        self._pd_threshold = snapshot.pd_threshold
        self._picks.clear()

    def pick(self, request: PickRequest, exclude: Collection[EngineKey] = ()) -> PickResponse:
        """Answer like the coordinator, by its rule, but without a pick's id: the serving engine of the lowest score.

        Ties rotate. The pick counts until the next snapshot or ``release``. Cached prefixes are not considered: only
        the coordinator knows them. Raises ``Unavailable`` when no engine serves.
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
        index, whole = pairing.choose(candidates, request.role, self._pd_threshold)
        self._turn = index + 1
        identity = self._entries[index].identity
        self.count(EngineKey(identity.engine_id, identity.epoch))
        return PickResponse(engine=identity, whole_request=whole)

    def count(self, key: EngineKey) -> None:
        """Count one more leg that was placed on an engine."""
        self._picks[key] += 1

    def release(self, key: EngineKey) -> None:
        """Forget a leg that was counted and has ended."""
        if self._picks[key] > 0:
            self._picks[key] -= 1

    def _score(self, entry: EngineEntry) -> int:
        identity = entry.identity
        return entry.score + _WAITING_WEIGHT * self._picks[EngineKey(identity.engine_id, identity.epoch)]

    def _is_ours(self, entry: EngineEntry) -> bool:
        return fingerprint_difference(self._fingerprint, entry.identity.fingerprint) is None


def _is_candidate(entry: EngineEntry, request: PickRequest, exclude: Collection[EngineKey]) -> bool:
    identity = entry.identity
    return (
        entry.report.state == EngineState.ENGINE_STATE_SERVING
        and (identity.engine_id, identity.epoch) not in exclude
        and pairing.in_pool(request.fingerprint, identity.fingerprint, request.role)
    )
