"""Decides which engines serve a model's name: of different weights, those that came first. No I/O."""

from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.runtime.peers.hello import engine_difference
from tokenloom.services.runtime.placement.fingerprint_kinds import POOL_FIELDS, weights_of
from tokenloom.v1.coordinator_pb2 import EngineState

from .engine_record import OTHER_WEIGHTS, EngineRecord

_Key = tuple[str, bytes]
_Weights = tuple[bytes, frozenset[str]]
"""See :func:`.weights_of`."""
_NAMED = (*POOL_FIELDS, "numerics")
_ENTITLED = frozenset(
    (EngineState.ENGINE_STATE_STARTING, EngineState.ENGINE_STATE_SERVING, EngineState.ENGINE_STATE_PAUSED)
)
"""States in which an engine keeps the name for its weights: one that is paused while weights are reloaded included."""


class ModelClaims:
    """Keeps, for each model name and tokenizer, the weights that serve it, and to what they are rounded.

    Requests name a model, not its weights: were two served, answers would alternate. The weights of the engine that
    joined first are served; engines with others wait aside, and serve once no engine with the first ones is left that
    serves or is paused. A request that began on an engine may go on at one that waits aside, with the same weights.
    While engines join a new coordinator, those that waited aside at the former one give way.

    Attributes:
        num_aside: Engines that wait aside.
        unannounced: Engines that do not know yet whether they wait, each with the reason; empty: it does not wait.
    """

    def __init__(self, fall_backs: FallBacks) -> None:
        self.unannounced: dict[str, str] = {}
        self.num_aside = 0
        self._fall_backs = fall_backs
        self._engines: dict[_Key, dict[_Weights, dict[str, EngineRecord]]] = {}  # by weights and name, as they joined
        self._holders: dict[_Key, _Weights] = {}
        self._contested: set[_Key] = set()  # those with engines of different weights, now or at the last look

    def join(self, record: EngineRecord) -> None:
        """Note an engine that joined. :meth:`settle` must follow before a pick."""
        key, weights = _of(record)
        pools = self._engines.setdefault(key, {})
        pools.setdefault(weights, {})[record.identity.engine_id] = record
        self._holders.setdefault(key, weights)
        if len(pools) > 1 or record.waited_aside:
            self._contested.add(key)

    def leave(self, record: EngineRecord) -> None:
        """Note an engine that left, or whose name a newer join has."""
        key, weights = _of(record)
        name, pools = record.identity.engine_id, self._engines[key]
        if record.waits_aside:
            self.num_aside -= 1
            self._fall_backs.end(OTHER_WEIGHTS, name)
        if pools[weights].get(name) is record:
            del pools[weights][name]
        if not pools[weights]:
            del pools[weights]
        if not pools:
            del self._engines[key], self._holders[key]
            self._contested.discard(key)
        self.unannounced.pop(name, None)

    def settle(self, *, is_complete: bool) -> list[EngineRecord]:
        """Return the engines that wait aside from now on, or do not any more. To be called when an engine joined, left
        or changed its state. ``is_complete``: whether all engines of the former coordinator have joined."""
        changed: list[EngineRecord] = []
        for key in list(self._contested):
            changed += self._settle(key, is_complete=is_complete)
            if is_complete and len(self._engines[key]) == 1:
                self._contested.discard(key)
        return changed

    def _settle(self, key: _Key, *, is_complete: bool) -> list[EngineRecord]:
        pools = self._engines[key]
        holder = self._holders[key] = self._holder(key, is_complete=is_complete)
        first = next(iter(pools[holder].values()))
        changed = []
        for weights, records in pools.items():
            for name, record in records.items():
                reason = "" if weights == holder else _reason(first, record)
                if record.waited_aside and not is_complete:
                    reason = reason or "it waited aside at the former coordinator, whose engines are not back yet"
                if reason != record.waits_aside or (record.waited_aside and is_complete):
                    record.waited_aside = record.waited_aside and not is_complete
                    self.num_aside += bool(reason) - bool(record.waits_aside)
                    record.waits_aside = reason
                    self._note(name, reason)
                    changed.append(record)
        return changed

    def _holder(self, key: _Key, *, is_complete: bool) -> _Weights:
        """Return the weights that serve: those before while an engine is entitled to them, else the first such ones."""
        pools, before = self._engines[key], self._holders[key]
        entitled = [
            (weights, record) for weights, records in pools.items() for record in records.values() if _entitled(record)
        ]
        if not is_complete:  # those that waited aside come last
            entitled = [each for each in entitled if not each[1].waited_aside] or entitled
        candidates = [weights for weights, _ in entitled] or list(pools)
        # The holder keeps the name while it can: with the newest or the most engines instead, a rolling update would
        # let answers alternate between two models.
        return before if before in candidates else candidates[0]

    def _note(self, name: str, reason: str) -> None:
        self.unannounced[name] = reason
        if reason:
            self._fall_backs.begin(OTHER_WEIGHTS, reason, name)
        else:
            self._fall_backs.end(OTHER_WEIGHTS, name)


def _of(record: EngineRecord) -> tuple[_Key, _Weights]:
    fingerprint = record.identity.fingerprint
    return (fingerprint.model, fingerprint.tokenizer), weights_of(fingerprint)


def _entitled(record: EngineRecord) -> bool:
    # One that lacks the weights that an operator wants of all engines would keep those that have them from serving.
    return record.own_state in _ENTITLED and record.takes_weights and not record.lacks_weights


def _reason(first: EngineRecord, other: EngineRecord) -> str:
    """Return why ``other`` waits aside, for operators."""
    difference = engine_difference(first.identity.fingerprint, other.identity.fingerprint, _NAMED)
    return f"{difference} as engine {first.identity.engine_id} serves {other.identity.fingerprint.model!r}"
