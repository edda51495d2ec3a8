"""Keeps the joined engines and picks among them. A new coordinator rebuilds this state from re-joins. Notes which
engines have changed since the watchers' messages were made, and remembers what the coordinator before showed. No
I/O."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.runtime.placement.engine_columns import EngineColumns, IntColumn
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds
from tokenloom.services.runtime.placement.rules import BROUGHT_BACK, Home, Rule, cost, load_score, score
from tokenloom.services.runtime.registry.engine_loads import loads_of
from tokenloom.v1.coordinator_pb2 import (
    DesiredState,
    EngineEntry,
    EngineIdentity,
    EngineLoads,
    EngineProgress,
    EngineRef,
    EngineReport,
    PickRequest,
    PlacementRule,
    SetDesiredStateRequest,
)
from tokenloom.v1.types_pb2 import Adapter

from ..picks.placed import ExpiringPicks, Placed
from ..picks.prefix_placements import PrefixPlacements
from ..picks.sessions import SessionTable, Turn
from ..prefixes.hash_table import NO_WORDS, words_of
from ..prefixes.prefix_index import PrefixIndex
from ..prefixes.state_boundaries import StateBoundaries
from .defaults import PREFIX_INDEX_MIB, SETTLE_SECONDS
from .encoders import Encoders
from .engine_placement import EngineCosts, Placement, Policy, check_request
from .engine_pools import EnginePools
from .engine_record import LATE_SECONDS, PICK_SECONDS, STANDSTILL_SECONDS, ChangedEngines, EngineRecord, check_name
from .engine_signs import EngineSigns
from .model_claims import ModelClaims
from .wanted_adapters import WantedAdapters
from .wanted_state import Predecessor, WantedState

JOINS_APART_SECONDS = 0.5
"""While engines join a new coordinator at shorter intervals, its view is not complete: more are on their way."""
MAX_MORE_SECONDS = 30.0
"""As long as that prolongs ``settle_seconds``, at most."""
_SPARE_KINDS = 64
"""Fingerprints that are kept although no engine may have them any more."""


class Registry:
    """Keeps joins, reports and picks of one coordinator.

    ``refresh`` notices what time alone changes. Picks and entries see the state of the last ``refresh``.

    Args:
        epoch: Incarnation of the coordinator; part of every pick's id.
        clock: Monotonic seconds.
        policy: What an operator decides.
        predecessor: What the coordinator knew whose place this one takes; None: nothing.
        wall_milliseconds: Milliseconds since 1970.

    Attributes:
        adapters: The LoRA adapters that the engines should have.
        wanted: The state that the engines should be in.
        encoders: The encoders, among which nothing is picked.
        changed: The engines that changed since the last look of the feed of snapshots.
        prefixes: Which blocks the engines have in their caches.
        states: After which beginnings of prompts engines keep states of layers.
        popular: Where prompts with popular beginnings were placed.
        sessions: Where the KV of sessions lies, and when their next turns are likely.
        uses_prefixes: Whether a pick has named blocks of its prompt.
        claims: Which weights serve a model's name.
        placing: Chooses among engines.
    """

    def __init__(
        self,
        epoch: int,
        clock: Callable[[], float],
        *,
        policy: Policy,
        settle_seconds: float = SETTLE_SECONDS,
        predecessor: Predecessor | None = None,
        prefix_index_bytes: int = PREFIX_INDEX_MIB << 20,
        fall_backs: FallBacks | None = None,
        wall_milliseconds: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._epoch = epoch
        self._clock = clock
        self._complete_at = clock() + settle_seconds
        self._latest_complete_at = self._complete_at + MAX_MORE_SECONDS
        self._is_complete = settle_seconds <= 0
        self._records: dict[str, EngineRecord] = {}
        self._columns = EngineColumns()
        self._kinds = FingerprintKinds()
        self._by_row: dict[int, EngineRecord] = {}
        self.prefixes = PrefixIndex(prefix_index_bytes)
        self.states = StateBoundaries()
        self.popular = PrefixPlacements()
        self.sessions = SessionTable(clock, self._count_session, (epoch & 0xFFFF_FFFF) << 32 | 1)
        self.uses_prefixes = False
        self.placing = Placement(self._columns, self._kinds, policy)
        self._costs = EngineCosts(self._columns, self._kinds) if policy.rule is cost else None
        self._expiring = ExpiringPicks()
        self._num_picks = 0
        self.encoders = Encoders(clock)
        self.adapters = WantedAdapters()
        self.wanted = WantedState(wall_milliseconds)
        self._incarnation = 0  # the last one that was given
        self._fall_backs = fall_backs or FallBacks()
        self.claims = ModelClaims(self._fall_backs)
        self._signs = EngineSigns(self._fall_backs)
        self._is_unsettled = self._is_unseen = False  # since engines joined, left, or changed their state or role
        self._pools = EnginePools(
            *(self._columns, self._kinds, self._by_row, self.adapters, clock, self._fall_backs),
            mixes_numerics=policy.mixes_numerics,
        )
        self._awaited: set[str] = set()  # engines of the predecessor that have not joined yet
        if predecessor is not None:
            self._awaited.update(predecessor.engine_ids)
            self.adapters.inherit(predecessor.adapters, predecessor.unloaded)
            self.wanted.adopt(predecessor.desired)
        self._has_predecessor = bool(self._awaited)
        self.changed = ChangedEngines()
        self.num_reports = 0
        """Reports that engines have sent after their joins."""
        self.revision = 1
        """Grows with every change."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def epoch(self) -> int:
        """The incarnation of the coordinator."""
        return self._epoch

    @property
    def num_ended(self) -> Mapping[str, int]:
        """How often an engine has ended for each of :data:`.engine_signs.ENDINGS`."""
        return self._signs.num_ended

    @property
    def is_complete(self) -> bool:
        """False while a new coordinator waits for engines to join again."""
        return self._is_complete

    @property
    def pd_threshold(self) -> int:
        """Uncached prompt tokens below which an engine does the whole request."""
        return self.placing.policy.pd_threshold

    @property
    def mixes_numerics(self) -> bool:
        """Whether requests go on between engines of ours and servers of others."""
        return self.placing.policy.mixes_numerics

    @property
    def placement(self) -> PlacementRule:
        """The rule by which engines are compared."""
        words: dict[Rule, PlacementRule] = {
            score: PlacementRule.PLACEMENT_RULE_SCORE,
            cost: PlacementRule.PLACEMENT_RULE_COST,
        }
        return words.get(self.placing.policy.rule, PlacementRule.PLACEMENT_RULE_PLUGIN)

    def check_name(self, first: EngineReport) -> None:
        """Check that an engine may join under its name. Raises as :func:`.check_name`."""
        if (holder := self._records.get(first.identity.engine_id)) is not None:
            check_name(holder, first, self._clock())

    def join(self, identity: EngineIdentity, report: EngineReport) -> EngineRecord:
        """Add an engine that opened a stream; it takes the place of an older one of its name."""
        now, columns = self._clock(), self._columns
        older = self._records.get(identity.engine_id)
        if older is None:
            row = columns.add()
        else:
            row = older.row
        last_turn = columns.last_turn[row]
        record = EngineRecord(identity, report, now, columns, row)
        columns.kind[row] = self._kind(identity)
        columns.share(row, identity.kv_store)
        if older is not None and older.identity.epoch == identity.epoch:
            record.inherit(older)
            columns.last_turn[row] = last_turn
            if report.picks_arrived:
                self._signs.arrived(record)
        else:
            self.prefixes.open(row, identity.num_kv_blocks)
            self.states.open(row, identity.num_state_slots, identity.state_boundary)
            self._signs.forget(identity.engine_id)  # the fall-backs are those of an earlier incarnation
        known = older.report if older is not None and older.identity.epoch == identity.epoch else EngineReport()
        self._signs.reported(identity.engine_id, known, report, now)
        if older is not None:
            self.claims.leave(older)
        self._records[identity.engine_id] = self._by_row[row] = record
        # The row may be a predecessor's, or new to an engine that was cut off for a while and still has its sessions.
        expected = self.sessions.tokens_on(EngineRef(engine_id=identity.engine_id, epoch=identity.epoch))
        columns.session_share[row] = expected / record.kv_tokens if expected else 0.0
        self.claims.join(record)
        self._awaited.discard(identity.engine_id)
        if not self._is_complete:
            self._complete_at = min(max(self._complete_at, now + JOINS_APART_SECONDS), self._latest_complete_at)
        record.incarnation = report.join.incarnation or self.wanted.after(self._incarnation)
        self._incarnation = max(self._incarnation, record.incarnation)
        if self.wanted.join(record):
            self._want_of_all()
        self.wanted.want_of(record, is_complete=self._is_complete, is_join=True)
        record.update(report, self._epoch, now)
        self._regroup(identity.engine_id)
        return record

    def set_state(self, request: SetDesiredStateRequest) -> None:
        """Want another state. Until an engine reports that it is in it, no request is placed there. Raises as
        :meth:`.WantedState.change`."""
        self.wanted.change(request)
        self._want_of_all()

    def desired(self, record: EngineRecord) -> DesiredState | None:
        """Return what an engine has to be sent of the wanted state; None while that is not known."""
        return self.wanted.message(record, is_complete=self._is_complete)

    def progress(self, names: Iterable[str]) -> list[EngineProgress]:
        """Return how far all engines are with the wanted state. ``names``: further ones, which may have left."""
        if self._is_unsettled:
            self._settle()  # which engines wait aside is part of it
        every = sorted({*names, *self._records})
        return [self.wanted.progress(name, self._records.get(name)) for name in every]

    def report(self, record: EngineRecord, report: EngineReport) -> None:
        """Take a later report of that engine, unless a newer join has its name."""
        if self._by_row.get(record.row) is not record:
            return
        self.num_reports += 1
        if report.picks_arrived and record.lost_picks and self._signs.arrived(record):
            self.changed.other([record.identity.engine_id])
        if report.fall_backs != record.report.fall_backs:
            self._signs.reported(record.identity.engine_id, record.report, report, self._clock())
            self.changed.other([record.identity.engine_id])
        before = record.own_state, record.report.role, record.adapters, record.report.progress.reached
        if report.role != record.report.role:
            self.wanted.learn(record, report)
        if report.adapters != record.report.adapters:  # for example one was pinned
            self.changed.other([record.identity.engine_id])
        if record.update(report, self._epoch, self._clock()):
            self.revision += 1
            self.changed.load(record.identity.engine_id)
        if before != (record.own_state, report.role, record.adapters, report.progress.reached):
            self._regroup(record.identity.engine_id)

    def set_adapter(self, adapter: Adapter, *, unloaded: bool) -> None:
        """Record what an operator did on all engines. Raises as :meth:`.WantedAdapters.set`."""
        self.adapters.set(adapter, unloaded=unloaded)
        self.revision += 1

    def leave(self, record: EngineRecord) -> None:
        """Remove an engine whose stream ended, unless a newer join has its name."""
        if self._by_row.get(record.row) is record:
            del self._records[record.identity.engine_id], self._by_row[record.row]
            self.claims.leave(record)
            self._signs.forget(record.identity.engine_id)
            self._columns.remove(record.row)
            self.prefixes.close(record.row)
            self.states.close(record.row)
            self._regroup(record.identity.engine_id)

    def pick(self, request: PickRequest) -> Placed:
        """Place one leg and count it. Raises what :func:`.check_request` and :meth:`.Placement.choose` raise,
        ``ModelNotFound`` for an adapter that was unloaded, and ``InvalidArgument`` for a subset that cannot be."""
        check_request(request)
        if self._is_unsettled:
            self._settle()
        pool, near = self._pools.find(request, is_complete=self._is_complete)
        excluded = self._rows(request.exclude) if request.exclude else []
        words, path, cached = NO_WORDS, None, None
        if hashes := request.block_hash_prefixes:
            words = words_of(hashes if len(hashes) <= MAX_HASHES else hashes[:MAX_HASHES])
            path, tokens = self.prefixes.lookup(words, self._columns.capacity)
            cached = None if tokens is None else self._cached_tokens(tokens, request)
        turn = self.sessions.find(request, words) if self.placing.policy.has_sessions else None
        home = None if turn is None else self._home(turn, request)
        if self._columns.has_stores:
            cached, home = self.placing.reach(pool, request, excluded, cached, home)
        if near is not None and (
            home is None or home.row is None or home.row in near.rows or home.row not in pool.rows
        ):
            row, whole = self.placing.choose_near(near, pool, request, excluded, cached, home)
        else:
            row, whole = self.placing.choose(pool, request, excluded, cached, home)
        record = self._by_row[row]
        now, self._num_picks = self._clock(), self._num_picks + 1
        uncached_tokens = request.prompt_tokens - (0 if cached is None else int(cached[row]))
        if home is not None and home.row == row:  # others wait for what it computes, as the rules assumed it
            uncached_tokens = min(uncached_tokens, request.prompt_tokens - round(BROUGHT_BACK * home.tokens))
        record.count(self._num_picks, request.prompt_tokens, uncached_tokens)
        if path is not None:
            self.uses_prefixes = True
            self.prefixes.add(path, row)
            if self.states:
                block_size = record.identity.fingerprint.block_size
                self.states.picked(row, request.block_hash_prefixes, request.prompt_tokens, block_size)
            self.popular.note(request.block_hash_prefixes, record.identity.engine_id)
        self._expiring.add(now + PICK_SECONDS, row)
        self._expire(now)  # a few at each pick: those of a tenth of a second together would keep others waiting
        self.revision += 1
        self.changed.load(record.identity.engine_id)
        session = None
        if turn is not None:
            before = self._rows([turn.engine]) if self._columns.has_stores and turn.engine is not None else ()
            in_store = self._columns.share_store(row, before)
            session = self.sessions.note(turn, request, record.identity, in_store=in_store)
        return Placed(record.identity, record.answer_part, whole, self._epoch, self._num_picks, session)

    def refresh(self) -> None:
        """Notice what time alone changes. To be called several times a second."""
        now = self._clock()
        self._expire(now)
        self._pools.refresh(now)
        self.encoders.refresh()
        self.changed.other(self._signs.refresh(now))
        changed = [record for record in self._silent(now) if record.refresh(now)]
        is_complete = now >= self._complete_at or (self._has_predecessor and not self._awaited)
        if changed or is_complete != self._is_complete:
            if is_complete != self._is_complete:
                self._is_complete = is_complete
                self._want_of_all()
            self._regroup(*(record.identity.engine_id for record in changed))
        if self._is_unsettled:
            self._settle()
        if self._is_unseen:
            self._is_unseen = False
            self.changed.other(self._signs.look(self._records.values()))

    def entry(self, engine_id: str) -> EngineEntry | None:
        """Return an engine as snapshots show it now; None if it is not joined."""
        record = self._records.get(engine_id)
        if record is None:
            return None
        if self._is_unsettled:
            self._settle()
        entry = record.entry(self._clock())
        if self._costs is not None:
            self._costs.look(self.revision)
            entry.uncached_tokens = int(self._columns.uncached_tokens[record.row])
            entry.uncached_tokens_per_second = float(self._costs.rates[record.row])
            entry.expected_seconds = float(self._costs.seconds[record.row])
        known = {each.kind for each in entry.report.fall_backs}
        for kind, detail in self._fall_backs.of(engine_id).items():
            if kind not in known:
                entry.report.fall_backs.add(kind=kind, detail=detail)
        return entry

    def loads(self, numbers: Mapping[str, int]) -> EngineLoads:
        """Return what :meth:`entry` shows of the loads of joined engines, each of which is given with its number. They
        come from the columns: a thousand entries would keep picks waiting for more than 10 ms."""
        records, columns = [self._records[engine_id] for engine_id in numbers], self._columns
        rows = [record.row for record in records]
        waiting = columns.waiting[rows]
        return loads_of(
            [record.shown for record in records],
            number=list(numbers.values()),
            age_milliseconds=np.rint((self._clock() - columns.reported_at[rows]) * 1000).astype(np.int64).tolist(),
            score=load_score(waiting, columns.running[rows]).tolist(),
            waiting=waiting.tolist(),
            waiting_tokens=columns.waiting_tokens[rows].tolist(),
            **self._cost_columns(rows),
        )

    def _want_of_all(self) -> None:
        """Note which state all engines have to reach, because it has changed, or is known now."""
        now = self._clock()
        for record in self._records.values():
            self.wanted.want_of(record, is_complete=self._is_complete)
            record.refresh(now)
        if self._records:
            self._regroup(*self._records)

    def _cost_columns(self, rows: Sequence[int]) -> dict[str, Sequence[float]]:
        """Return what only watchers of the rule ``cost`` are shown of these engines."""
        if self._costs is None:
            return {}
        self._costs.look(self.revision)
        return {
            "uncached_tokens": self._columns.uncached_tokens[rows].astype(np.int64).tolist(),
            "uncached_tokens_per_second": self._costs.rates[rows].tolist(),
            "expected_seconds": self._costs.seconds[rows].tolist(),
        }

    def _cached_tokens(self, tokens: IntColumn, request: PickRequest) -> IntColumn:
        """Return how many tokens of a prompt each engine has cached, by row. ``tokens``: how many blocks; changed."""
        if self.states:  # kept only with the blocks before them: without any block there is no state
            self.states.put_into(tokens, request.block_hash_prefixes)
        tokens *= self._columns.block_size
        np.minimum(tokens, np.array(request.prompt_tokens), out=tokens)
        return tokens

    def _home(self, turn: Turn, request: PickRequest) -> Home:
        """Return where the KV of a session lies."""
        if turn.engine is None or not turn.returns or not (rows := self._rows([turn.engine])):
            return Home(None)
        row = rows[0]
        tokens = min(turn.num_blocks * int(self._columns.block_size[row]), request.prompt_tokens)
        return Home(row, tokens, turn.counted_tokens / self._by_row[row].kv_tokens)

    def _count_session(self, engine: EngineRef, tokens: int) -> None:
        """Note that the sessions whose next turns are expected on an engine have so many tokens more."""
        for row in self._rows([engine]):
            self._columns.session_share[row] += tokens / self._by_row[row].kv_tokens

    def _rows(self, refs: Sequence[EngineRef]) -> list[int]:
        """Return the rows of those of the engines that are joined."""
        records = ((self._records.get(ref.engine_id), ref.epoch) for ref in refs)
        return [record.row for record, epoch in records if record is not None and record.identity.epoch == epoch]

    def _expire(self, now: float) -> None:
        """Forget picks that never arrived."""
        for number, row in self._expiring.expire(now):
            if (record := self._by_row.get(row)) is not None and record.expire(number):
                self.revision += 1
                self.changed.load(record.identity.engine_id)
                if self._signs.lost(record):
                    self.changed.other([record.identity.engine_id])

    def _silent(self, now: float) -> Iterator[EngineRecord]:
        """Yield the engines that have not reported for a while or made no progress."""
        columns, used = self._columns, slice(self._columns.num_rows)
        silent = columns.reported_at[used] < now - LATE_SECONDS
        standing = columns.progressed_at[used] < now - STANDSTILL_SECONDS
        for row in np.flatnonzero(silent | standing).tolist():
            if (record := self._by_row.get(row)) is not None:
                yield record

    def _kind(self, identity: EngineIdentity) -> int:
        """Return the number of an engine's fingerprint."""
        if len(self._kinds) > len(self._records) + _SPARE_KINDS:  # of engines that left
            self._kinds.clear()
            for record in self._records.values():
                self._columns.kind[record.row] = self._kinds.number(record.identity.fingerprint)
        return self._kinds.number(identity.fingerprint)

    def _regroup(self, *names: str) -> None:
        """Note that engines joined, left or changed their state or role, so that the pools are gathered again."""
        self._pools.clear()
        self._is_unsettled = self._is_unseen = True
        self.changed.other(names)
        self.revision += 1

    def _settle(self) -> None:
        """Let engines wait aside whose model's name others serve, before a pick or a snapshot sees them."""
        self._is_unsettled = False
        if changed := self.claims.settle(is_complete=self._is_complete):
            self._pools.clear()
            self._is_unseen = True
            self.changed.other([record.identity.engine_id for record in changed])
            self.revision += 1
