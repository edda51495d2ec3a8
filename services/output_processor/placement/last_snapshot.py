"""Places requests while the coordinator is away: by its last snapshot and the picks made since. No I/O."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from math import exp
from typing import NamedTuple

import numpy as np

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
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from . import prefix_homes

_WAITING_WEIGHT = 4  # what one waiting request adds to a score
FADE_SECONDS = 2.0
"""After so long the loads of the last snapshot count for 1/e. All output processors have the same ones and would send
their requests to the same engine, long after it has ceased to be the idle one."""
_BOTH, _PREFILL, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
_SLACK = 2.0 * _WAITING_WEIGHT
_ABLE_TO_BEGIN = ((_BOTH, _DECODE), (_BOTH, _PREFILL))
_KEY_STEP, _KEY_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # the golden ratio: keys that never repeat (SplitMix64)


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
        self._entries: list[EngineEntry] = []
        self._serving: frozenset[EngineKey] = frozenset()
        self._pd_threshold = 0
        self._epoch = 0
        self._complete = False
        self._picks: Counter[EngineKey] = Counter()  # since the snapshot, and still live
        self._random_key = seed

    def update(self, snapshot: Snapshot) -> bool:
        """Take a new snapshot. While engines still re-join a new coordinator, the snapshot of the former one stays.

        Returns whether an engine serves that did not serve before.
        """
        is_new_coordinator = snapshot.coordinator_epoch != self._epoch
        if self._entries and not snapshot.complete and (self._complete or is_new_coordinator):
            return False
        self._epoch = snapshot.coordinator_epoch
        self._complete = snapshot.complete
        self._taken_at = self._clock()
        self._entries = [entry for entry in snapshot.engines if self._is_ours(entry)]
        self._pd_threshold = snapshot.pd_threshold
        self._picks.clear()
        before, self._serving = self._serving, frozenset(map(_key, filter(_is_serving, self._entries)))
        return not self._serving <= before

    def pick(self, request: PickRequest, exclude: Collection[EngineKey] = ()) -> PickResponse:
        """Answer like the coordinator, but without a pick's id.

        Other output processors place requests at the same time and do not see these picks. Therefore the prefix of the
        prompt names a few engines, the same everywhere, and own picks decide between them, with the loads of the last
        snapshot while it is young (:func:`.prefix_homes.best_home`). A request without a prefix draws its engines.

        The pick counts until the next snapshot or ``release``. Raises ``Unavailable`` when no engine serves, or none
        has the request's adapter.
        """
        able = [entry for entry in self._entries if _is_candidate(entry, request, exclude)]
        if not able:
            raise errors.Unavailable("No engine is serving this model now; retry.")
        if request.query_id:
            names = [(*_key(entry), entry.report.role) for entry in able]
            able = [pairing.engine_of_query(able, names, request.query_id)]
        candidates = list(self._candidates(able, request))
        engine, whole = pairing.choose(candidates, request.role, 0 if request.pools else self._pd_threshold)
        self.count(_key(engine))
        return PickResponse(engine=engine.identity, whole_request=whole)

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

    def _candidates(
        self, able: Sequence[EngineEntry], request: PickRequest
    ) -> Iterator[pairing.Candidate[EngineEntry]]:
        """Yield the engine that would do the whole request, and the one that would begin it."""
        keys = self._keys(request)
        fade = exp((self._taken_at - self._clock()) / FADE_SECONDS)
        for roles in _ABLE_TO_BEGIN:
            entries = [entry for entry in able if entry.report.role in roles]
            if not entries:
                continue
            loads = np.array([entry.score * fade + _WAITING_WEIGHT * self._picks[_key(entry)] for entry in entries])
            salts = prefix_homes.salts_of(entry.identity.engine_id for entry in entries)
            best = entries[prefix_homes.best_home(salts, loads, keys, _SLACK)]
            yield pairing.Candidate(best, best.report.role, best.identity.fingerprint, (), request.prompt_tokens)

    def _keys(self, request: PickRequest) -> Sequence[int]:
        """Return what names the engines of a leg. A decode leg saves no prefill, only a copy: it goes by load."""
        if request.role != _DECODE and (keys := list(prefix_homes.keys_of(request.block_hash_prefixes))):
            return keys
        self._random_key = (self._random_key + _KEY_STEP) & _KEY_BITS
        return [self._random_key]

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
