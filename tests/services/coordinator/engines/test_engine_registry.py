"""Tests joins, leaves and snapshots, with a clock that tests move and with arbitrary histories."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.services.coordinator.engines.engine_registry import MAX_MORE_SECONDS, Registry
from tokenloom.services.coordinator.engines.engine_signs import LOST_PICKS
from tokenloom.services.coordinator.prefixes.hash_table import words_of
from tokenloom.services.runtime.registry.engine_loads import set_loads
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def identity(name: str, epoch: int = 1) -> EngineIdentity:
    return EngineIdentity(
        engine_id=name,
        epoch=epoch,
        address=f"unix:/{name}",
        num_kv_blocks=64,
        fingerprint=Fingerprint(model="m", block_size=16),
        limits=ModelLimits(max_model_len=1024, vocab_size=9),
    )


def report(**fields: object) -> EngineReport:
    values = {"role": EngineRole.ENGINE_ROLE_BOTH, "state": EngineState.ENGINE_STATE_SERVING, "free_kv_blocks": 64}
    return EngineReport(**{**values, **fields})


def pick_ids(numbers: set[int]) -> list[PickId]:
    return [PickId(coordinator_epoch=1, number=number) for number in numbers]


REQUEST = PickRequest(role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=10)


def test_a_rank_of_a_group_that_still_forms_is_no_fault_of_the_client() -> None:
    registry, member = Registry(1, Clock(), policy=DEFAULT_POLICY), identity("a")
    member.data_parallel_group, member.computes_in_waves = "g", True
    request = PickRequest(role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=10, data_parallel_rank=1)
    joined = registry.join(member, report())
    with pytest.raises(Unavailable, match="still joining it"):
        registry.pick(request)
    registry.report(joined, report(group_size=1))
    with pytest.raises(InvalidArgument, match="there are 1 ranks"):
        registry.pick(request)


def test_a_new_coordinator_is_incomplete_for_two_seconds() -> None:
    clock = Clock()
    registry = Registry(1, clock, policy=DEFAULT_POLICY)
    before = registry.revision
    assert not snapshot_of(registry).complete
    clock.now += 1.9
    registry.refresh()
    assert not snapshot_of(registry).complete
    assert registry.revision == before
    clock.now += 0.2
    registry.refresh()
    assert snapshot_of(registry).complete
    assert registry.revision == before + 1


def test_of_engines_that_keep_states_the_last_shared_boundary_counts() -> None:
    """Both engines have the first ten blocks of the prompt; one of them can begin behind the fourth only."""
    registry = Registry(1, Clock(), policy=DEFAULT_POLICY)
    first = PickRequest(role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=160, block_hash_prefixes=range(1, 11))
    with_states = identity("a")
    with_states.num_state_slots, with_states.state_boundary = 8, 64
    rows = {}
    for engine in (with_states, identity("b")):
        record = registry.join(engine, report())
        rows[engine.engine_id] = record.row
        registry.refresh()
        registry.prefixes.add(registry.prefixes.find(first.block_hash_prefixes), record.row)
    registry.states.store(rows["a"], [4])
    _, num_blocks = registry.prefixes.lookup(words_of(first.block_hash_prefixes), 16)
    assert num_blocks is not None
    found = registry._cached_tokens(num_blocks, first)
    assert (found[rows["a"]], found[rows["b"]]) == (64, 160)


def test_the_newest_join_of_a_name_wins() -> None:
    registry = Registry(1, Clock(), policy=DEFAULT_POLICY)
    older = registry.join(identity("a", epoch=1), report(waiting=1))
    newer = registry.join(identity("a", epoch=2), report(waiting=2))
    registry.report(older, report(waiting=9))
    registry.leave(older)  # the old stream ends after the new one began
    (entry,) = snapshot_of(registry).engines
    assert (entry.identity.epoch, entry.report.waiting) == (2, 2)
    registry.leave(newer)
    assert not snapshot_of(registry).engines


def test_a_snapshot_shows_report_score_and_age() -> None:
    clock = Clock()
    registry = Registry(5, clock, policy=DEFAULT_POLICY)
    registry.join(identity("a"), report(waiting=1, running=2, step=9, picks_arrived=[PickId(number=1)]))
    clock.now += 0.5
    registry.pick(REQUEST)
    snapshot = snapshot_of(registry)
    (entry,) = snapshot.engines
    assert snapshot.coordinator_epoch == 5
    assert entry.score == (1 + 1) * 4 + 2
    assert entry.age.ToMilliseconds() == 500
    assert entry.report == report(waiting=1, running=2)


def test_what_does_not_change_makes_no_revision() -> None:
    registry = Registry(1, Clock(), policy=DEFAULT_POLICY)
    record = registry.join(identity("a"), report(running=1, step=1))
    before = registry.revision
    registry.report(record, report(running=1, step=2))
    assert registry.revision == before
    registry.report(record, report(running=2, step=3))
    assert registry.revision == before + 1


def test_a_pick_that_arrived_is_a_change() -> None:
    registry = Registry(5, Clock(), policy=DEFAULT_POLICY)
    record = registry.join(identity("a"), report(running=1))
    registry.pick(REQUEST)
    before = registry.revision
    # The request has ended already: only the score falls, by the pick that is on its way no more.
    registry.report(record, report(running=1, picks_arrived=[PickId(coordinator_epoch=5, number=1)]))
    (entry,) = snapshot_of(registry).engines
    assert (registry.revision, entry.score) == (before + 1, 1)


def test_a_report_ends_lateness() -> None:
    clock = Clock()
    registry = Registry(1, clock, policy=DEFAULT_POLICY)
    record = registry.join(identity("a"), report())
    clock.now += 4
    registry.refresh()
    assert record.is_late
    registry.report(record, report(step=1))
    assert not record.is_late


def test_silence_is_a_change() -> None:
    clock = Clock()
    registry = Registry(1, clock, policy=DEFAULT_POLICY)
    registry.join(identity("a"), report())
    registry.refresh()
    clock.now += 10.5
    registry.refresh()
    (entry,) = snapshot_of(registry).engines
    assert entry.report.state == EngineState.ENGINE_STATE_DEAD


class RegistryMachine(RuleBasedStateMachine):
    """Any history of joins, reports, leaves, picks and time: scores and lost engines are what the model says."""

    names = st.sampled_from("abc")
    arrivals = st.sets(st.integers(1, 20))

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = Registry(1, self.clock, policy=DEFAULT_POLICY, settle_seconds=0)
        self.records = {}
        self.load: dict[str, tuple[int, int]] = {}
        self.counted: dict[str, dict[int, float]] = {}
        self.lost: dict[str, int] = {}  # picks in a row
        self.unreached: set[str] = set()
        self.seen: dict[str, bool] = {}  # what watchers were last sent: engines, and whether they are out of reach
        self.epoch = 0

    @rule(name=names)
    def join(self, name: str) -> None:
        self.epoch += 1
        self.records[name] = self.registry.join(identity(name, self.epoch), report())
        self.load[name], self.counted[name], self.lost[name] = (0, 0), {}, 0
        self.unreached.discard(name)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), arrived=arrivals)
    def join_again(self, data: st.DataObject, arrived: set[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.records)))
        same = self.records[name].identity
        self.records[name] = self.registry.join(same, report(picks_arrived=pick_ids(arrived)))
        self.load[name] = (0, 0)
        self.arrive(name, arrived)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), arrived=arrivals, waiting=st.integers(0, 5), running=st.integers(0, 5))
    def report_load(self, data: st.DataObject, arrived: set[int], waiting: int, running: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.records)))
        loaded = report(waiting=waiting, running=running, picks_arrived=pick_ids(arrived))
        self.registry.report(self.records[name], loaded)
        self.load[name] = (waiting, running)
        self.arrive(name, arrived)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.records)))
        self.registry.leave(self.records.pop(name))
        del self.load[name], self.counted[name], self.lost[name]
        self.unreached.discard(name)

    @rule()
    def pick(self) -> None:
        if not self.records:
            try:
                self.registry.pick(REQUEST)
            except Unavailable:
                return
            raise AssertionError("placed on nothing")
        self.forget()
        scores = {name: self.score(name) for name in self.records}
        response = self.registry.pick(REQUEST)
        name = response.engine.engine_id
        assert (self.is_late(name), scores[name]) == min((self.is_late(other), scores[other]) for other in scores)
        self.counted[name][response.pick.number] = self.clock.now + 2.0

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        for name, record in self.records.items():  # engines report every second: none is silent
            waiting, running = self.load[name]
            self.registry.report(record, report(waiting=waiting, running=running, step=round(self.clock.now * 2)))
        self.clock.now += seconds

    def arrive(self, name: str, arrived: set[int]) -> None:
        for number in arrived:
            self.counted[name].pop(number, None)
        if arrived:
            self.lost[name] = 0
            self.unreached.discard(name)

    def forget(self) -> None:
        for name, counted in self.counted.items():
            for number in [number for number, at in counted.items() if at <= self.clock.now]:
                del counted[number]
                self.lost[name] += 1
            if self.lost[name] >= LOST_PICKS:
                self.unreached.add(name)

    def is_late(self, name: str) -> bool:
        return self.records[name].is_late

    def score(self, name: str) -> int:
        waiting, running = self.load[name]
        return (waiting + len(self.counted[name])) * 4 + running

    @invariant()
    def snapshot_is_the_model(self) -> None:
        self.registry.refresh()
        self.forget()
        shown = {entry.identity.engine_id: entry.score for entry in snapshot_of(self.registry).engines}
        assert shown == {name: self.score(name) for name in self.records}

    @invariant()
    def watchers_are_told_which_engines_are_out_of_reach(self) -> None:
        self.registry.refresh()
        self.forget()
        shown = {
            entry.identity.engine_id: [each.kind for each in entry.report.fall_backs]
            for entry in snapshot_of(self.registry).engines
        }
        assert shown == {name: ["unreached"] if name in self.unreached else [] for name in self.records}
        unreached = {name: name in self.unreached for name in self.records}
        changed = {name for name in unreached.keys() | self.seen.keys() if unreached.get(name) != self.seen.get(name)}
        assert changed <= set(self.registry.changed.take_others())
        self.seen = unreached

    @invariant()
    def loads_are_those_of_the_entries(self) -> None:
        entries = [self.registry.entry(name) for name in self.records]
        loads = self.registry.loads({name: number for number, name in enumerate(self.records, 1)})
        shown = [EngineEntry(number=number, report=EngineReport()) for number in loads.number]
        set_loads(shown, loads, range(len(shown)))
        for number, entry in enumerate(entries, 1):
            entry.ClearField("identity")
            entry.report.ClearField("role")
            entry.report.ClearField("state")
            entry.report.ClearField("fall_backs")  # one that changed makes the whole entry be sent
            entry.number = number
        assert shown == entries


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_view_is_not_complete_while_engines_join_one_after_the_other() -> None:
    clock = Clock()
    registry = Registry(1, clock, policy=DEFAULT_POLICY, settle_seconds=2.0)
    seen = []
    for number in range(100):
        clock.now += 0.4
        registry.join(identity(f"e{number}"), report())
        registry.refresh()
        seen.append(registry.is_complete)
    assert 0.4 * seen.index(True) == pytest.approx(2.0 + MAX_MORE_SECONDS, abs=0.5), "not without end"
    waits = Registry(1, clock, policy=DEFAULT_POLICY, settle_seconds=2.0)
    clock.now += 1.9
    waits.join(identity("last"), report())
    for seconds, is_complete in ((0.2, False), (0.4, True)):
        clock.now += seconds
        waits.refresh()
        assert waits.is_complete is is_complete
