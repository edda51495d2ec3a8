"""The joined engines, and every pick among them. Soft state: a new coordinator rebuilds it from re-joins. No I/O."""

import logging
from collections.abc import Callable

from tokenloom.services.runtime.peers.pairing import missing_role
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineReport, EngineState, PickRequest, PickResponse, Snapshot
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole

from . import engine_placement
from .engine_record import EngineRecord

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.0
"""How long a new coordinator waits for engines of a former one to re-join before it calls its view complete."""


class Registry:
    """Joins, reports, picks and snapshots of one coordinator.

    Args:
        epoch: Incarnation of the coordinator; part of every pick's id.
        clock: Monotonic seconds.
        on_change: Called when the snapshot changed.
    """

    def __init__(
        self,
        epoch: int,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        *,
        policy: engine_placement.Policy | None = None,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._epoch = epoch
        self._clock = clock
        self._on_change = on_change
        self._policy = policy or engine_placement.Policy()
        self._complete_at = clock() + settle_seconds
        self._records: dict[str, EngineRecord] = {}
        self._num_picks = 0
        self._missing: EngineRole | None = None  # as last warned of
        self._revision = 1
        self._snapshot: Snapshot | None = None
        self._states: dict[str, EngineState] = {}  # as last shown, to see silence and standstill begin
        self._was_complete = self.is_complete

    def __len__(self) -> int:
        return len(self._records)

    @property
    def revision(self) -> int:
        """Grows with every change."""
        return self._revision

    @property
    def is_complete(self) -> bool:
        """Whether engines of a former coordinator had time to re-join."""
        return self._clock() >= self._complete_at

    def join(self, identity: EngineIdentity, report: EngineReport) -> EngineRecord:
        """An engine opened a stream; it takes the place of an older one of its name."""
        record = EngineRecord(identity, report, self._clock())
        if (older := self._records.get(identity.engine_id)) is not None:
            record.inherit(older)
        self._records[identity.engine_id] = record
        record.update(report, self._epoch, self._clock())
        self._changed()
        return record

    def report(self, record: EngineRecord, report: EngineReport) -> None:
        """A later message of that stream."""
        if record.update(report, self._epoch, self._clock()):
            self._changed()

    def leave(self, record: EngineRecord) -> None:
        """The stream ended: the engine is gone at once, unless a newer join has its name."""
        if self._records.get(record.identity.engine_id) is record:
            del self._records[record.identity.engine_id]
            self._changed()

    def pick(self, request: PickRequest) -> PickResponse:
        """Places one leg and counts it; errors as :func:`.placement.choose`."""
        engine_placement.check_request(request)
        self.refresh()
        now = self._clock()
        record, whole = engine_placement.choose(self._records.values(), request, now, self._policy)
        self._warn_of_missing_role(now)
        self._num_picks += 1
        record.count(self._num_picks, request.prompt_tokens, now, request.block_hash_prefixes)
        self._changed()
        return PickResponse(
            engine=record.identity,
            whole_request=whole,
            pick=PickId(coordinator_epoch=self._epoch, number=self._num_picks),
        )

    def refresh(self) -> None:
        """Notices what time alone changes; to be called every second or so."""
        now = self._clock()
        expired = [record.expire(now) for record in self._records.values()]
        states = {name: record.state(now) for name, record in self._records.items()}
        if any(expired) or states != self._states or self.is_complete != self._was_complete:
            self._states, self._was_complete = states, self.is_complete
            self._changed()

    def snapshot(self) -> Snapshot:
        """The registry now; the same object until something changes."""
        if self._snapshot is None:
            now = self._clock()
            self._snapshot = Snapshot(
                coordinator_epoch=self._epoch,
                revision=self._revision,
                complete=self.is_complete,
                engines=[record.entry(now) for record in self._records.values()],
                pd_threshold=self._policy.pd_threshold,
            )
        return self._snapshot

    def _warn_of_missing_role(self, now: float) -> None:
        """Once, when requests begin to do without engines of a role."""
        missing = missing_role(record.report.role for record in self._records.values() if record.is_serving(now))
        if missing != self._missing and missing is not None:
            name = EngineRole.Name(missing).removeprefix("ENGINE_ROLE_").lower()
            log.warning("no %s engine is serving: every request stays on one engine", name)
        self._missing = missing

    def _changed(self) -> None:
        self._revision += 1
        self._snapshot = None
        self._on_change()
