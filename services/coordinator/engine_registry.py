"""Keeps the joined engines and picks among them. A new coordinator rebuilds this state from re-joins. No I/O."""

import logging
from collections.abc import Callable, Sequence

from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.peers.pairing import in_pool, missing_role
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineReport, PickRequest, PickResponse, Snapshot
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import Adapter, EngineRole

from . import engine_placement
from .defaults import SETTLE_SECONDS
from .engine_record import EngineRecord
from .predecessor import Predecessor
from .wanted_adapters import WantedAdapters

log = logging.getLogger(__name__)

_MAX_POOLS = 64


class Registry:
    """Keeps joins, reports, picks and snapshots of one coordinator.

    ``refresh`` notices what time alone changes. Picks and snapshots see the state of the last ``refresh``.

    Args:
        epoch: Incarnation of the coordinator; part of every pick's id.
        clock: Monotonic seconds.
        predecessor: What the coordinator knew whose place this one takes; None: nothing.

    Attributes:
        adapters: The LoRA adapters that the engines should have.
    """

    def __init__(
        self,
        epoch: int,
        clock: Callable[[], float],
        *,
        policy: engine_placement.Policy | None = None,
        settle_seconds: float = SETTLE_SECONDS,
        predecessor: Predecessor | None = None,
    ) -> None:
        self._epoch = epoch
        self._clock = clock
        self._policy = policy or engine_placement.Policy()
        self._complete_at = clock() + settle_seconds
        self._is_complete = settle_seconds <= 0
        self._records: dict[str, EngineRecord] = {}
        # Serving engines by the fingerprint and role that requests ask for: nearly all ask for the same.
        self._pools: dict[tuple[bytes, EngineRole], Sequence[EngineRecord]] = {}
        self._num_picks = 0
        self._missing: EngineRole | None = None  # the last one that was logged
        self._snapshot: Snapshot | None = None
        self.adapters = WantedAdapters()
        self._awaited: set[str] = set()  # engines of the predecessor that have not joined yet
        if predecessor is not None:
            self._awaited.update(predecessor.engine_ids)
            self.adapters.inherit(predecessor.adapters, predecessor.unloaded)
        self._has_predecessor = bool(self._awaited)
        self.revision = 1
        """Grows with every change."""

    def __len__(self) -> int:
        return len(self._records)

    def join(self, identity: EngineIdentity, report: EngineReport) -> EngineRecord:
        """Add an engine that opened a stream; it takes the place of an older one of its name."""
        now = self._clock()
        record = EngineRecord(identity, report, now)
        if (older := self._records.get(identity.engine_id)) is not None:
            record.inherit(older)
        self._records[identity.engine_id] = record
        self._awaited.discard(identity.engine_id)
        record.update(report, self._epoch, now)
        self._regroup()
        return record

    def report(self, record: EngineRecord, report: EngineReport) -> None:
        """Take a later report of that engine."""
        before = record.state, record.report.role
        if record.update(report, self._epoch, self._clock()):
            self.revision += 1
        if before != (record.state, report.role):
            self._regroup()

    def set_adapter(self, adapter: Adapter, *, unloaded: bool) -> None:
        """Record what an operator did on all engines. Raises as :meth:`.WantedAdapters.set`."""
        self.adapters.set(adapter, unloaded=unloaded)
        self.revision += 1

    def leave(self, record: EngineRecord) -> None:
        """Remove an engine whose stream ended, unless a newer join has its name."""
        if self._records.get(record.identity.engine_id) is record:
            del self._records[record.identity.engine_id]
            self._regroup()

    def pick(self, request: PickRequest) -> PickResponse:
        """Place one leg and count it. Raises what :func:`.engine_placement.choose` raises, and ``ModelNotFound`` for an
        adapter that was unloaded."""
        key = request.fingerprint.SerializeToString(), request.role
        if (pool := self._pools.get(key)) is None:
            pool = self._pools[key] = self._gather(request)
        if request.adapter:
            pool = self._having(pool, request.adapter)
        record, whole = engine_placement.choose(pool, request, self._policy)
        self._num_picks += 1
        record.count(self._num_picks, request.prompt_tokens, self._clock(), request.block_hash_prefixes)
        self.revision += 1
        return PickResponse(
            engine=record.identity,
            whole_request=whole,
            pick=PickId(coordinator_epoch=self._epoch, number=self._num_picks),
        )

    def refresh(self) -> None:
        """Notice what time alone changes. To be called several times a second."""
        now = self._clock()
        is_complete = now >= self._complete_at or (self._has_predecessor and not self._awaited)
        changed = [record for record in self._records.values() if record.refresh(now)]
        if changed or is_complete != self._is_complete:
            self._is_complete = is_complete
            self._regroup()

    def snapshot(self) -> Snapshot:
        """Return the registry's view now; the same object until something changes."""
        if self._snapshot is None or self._snapshot.revision != self.revision:
            now = self._clock()
            self._snapshot = Snapshot(
                coordinator_epoch=self._epoch,
                revision=self.revision,
                complete=self._is_complete,
                engines=[record.entry(now) for record in self._records.values()],
                pd_threshold=self._policy.pd_threshold,
                adapters=self.adapters,
            )
        return self._snapshot

    def _having(self, pool: Sequence[EngineRecord], adapter: bytes) -> Sequence[EngineRecord]:
        """Return the engines of a pool that have an adapter. If none has it, ask one to load it and raise."""
        if having := [record for record in pool if adapter in record.adapters]:
            return having
        if not self._is_complete:
            raise Unavailable("Engines are still joining the coordinator; retry.")
        raise self.adapters.request(pool, adapter, self._clock())

    def _gather(self, request: PickRequest) -> list[EngineRecord]:
        """Return the serving engines of the pool that a request asks for."""
        if len(self._pools) >= _MAX_POOLS:
            self._pools.clear()
        serving = [record for record in self._records.values() if record.is_serving]
        self._warn_of_missing_role(serving)
        asked, role = request.fingerprint, request.role
        return [record for record in serving if in_pool(asked, record.identity.fingerprint, role)]

    def _warn_of_missing_role(self, serving: Sequence[EngineRecord]) -> None:
        """Log, once, when requests begin to do without engines of a role."""
        missing = missing_role(record.report.role for record in serving)
        if missing != self._missing and missing is not None:
            name = EngineRole.Name(missing).removeprefix("ENGINE_ROLE_").lower()
            log.warning("no %s engine is serving: every request stays on one engine", name)
        self._missing = missing

    def _regroup(self) -> None:
        """Note that an engine joined, left or changed its state or role, so that the pools are gathered again."""
        self._pools.clear()
        self.revision += 1
