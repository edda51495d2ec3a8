"""Tests the view that watchers keep of the registry, message by message."""

import pytest

from tests.services.runtime.registry.loads import load_of
from tokenloom.services.runtime.registry.engine_loads import clear_load, set_loads
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineIdentity,
    EngineLoads,
    EngineReport,
    EngineState,
    PlacementRule,
    Snapshot,
)
from tokenloom.v1.types_pb2 import Adapter, EngineRole

LOAD = EngineReport(
    waiting=1, running=2, waiting_tokens=3, kv_usage=0.5, free_kv_blocks=4, seats=5,
    prefill_tokens_per_second=6.0, starts_per_second=7.0, prompt_tokens_per_second=9.0,
    step_seconds=0.25, step_requests=10.0,
)  # fmt: skip


def entry(name: str, number: int, **fields: int) -> EngineEntry:
    report = EngineReport(state=EngineState.ENGINE_STATE_SERVING, role=EngineRole.ENGINE_ROLE_BOTH)
    return EngineEntry(identity=EngineIdentity(engine_id=name, epoch=1), report=report, number=number, **fields)


def loaded(name: str, number: int) -> EngineEntry:
    made = entry(name, number, score=8, waiting=9, waiting_tokens=10)
    made.report.MergeFrom(LOAD)
    made.age.FromMilliseconds(11)
    return made


def whole(*entries: EngineEntry, revision: int = 1, adapters: tuple[Adapter, ...] = ()) -> Snapshot:
    return Snapshot(coordinator_epoch=7, revision=revision, complete=True, engines=entries, adapters=adapters)


def change(base: int, **fields: object) -> Snapshot:
    return Snapshot(coordinator_epoch=7, base_revision=base, revision=base + 1, complete=True, **fields)  # type: ignore[arg-type]


def viewing(*entries: EngineEntry) -> RegistryView:
    view = RegistryView()
    assert view.take(whole(*entries))
    return view


@pytest.mark.parametrize("column", ["running", "age_milliseconds", "score"])
def test_loads_of_fewer_engines_than_are_named_are_refused_when_they_come(column: str) -> None:
    """Read later, in the middle of a request, they ended it, and each one after it."""
    view = viewing(entry("a", 1), entry("b", 2))
    with pytest.raises(ValueError, match="differ in number"):
        view.take(change(1, loads=EngineLoads(number=[1, 2], **{column: [5]})))
    assert [each.report.running for each in view.engines] == [0, 0]
    assert view.take(change(1, loads=EngineLoads(number=[1, 2], **{column: [5, 6]})))


def test_the_columns_carry_every_count_and_nothing_else() -> None:
    full, target = loaded("a", 1), entry("a", 1)
    set_loads([target], load_of(full), [0])
    assert target == full
    clear_load(target)
    assert target == entry("a", 1)


def test_columns_that_a_coordinator_does_not_know_leave_the_fields_alone() -> None:
    target = loaded("a", 1)
    set_loads([target], EngineLoads(number=[1], running=[77]), [0])
    expected = loaded("a", 1)
    expected.report.running = 77
    assert target == expected


def test_loads_reach_the_entries_when_they_are_asked_for() -> None:
    view = viewing(entry("a", 1), entry("b", 2))
    version, engines = view.version, view.engines
    assert view.take(change(1, loads=load_of(loaded("b", 2))))
    assert view.version == version
    assert engines[1].score == 0
    view.update_loads()
    assert engines[1] == loaded("b", 2)
    assert view.engines is engines


def test_an_entry_without_an_identity_keeps_the_one_that_is_known() -> None:
    view = viewing(entry("a", 1))
    draining = entry("a", 1)
    draining.ClearField("identity")
    draining.report.state = EngineState.ENGINE_STATE_DRAINING
    assert view.take(change(1, engines=[draining]))
    (shown,) = view.engines
    assert (shown.identity.engine_id, shown.report.state) == ("a", EngineState.ENGINE_STATE_DRAINING)


def test_what_does_not_fit_is_refused() -> None:
    nameless = entry("a", 5)
    nameless.ClearField("identity")
    for message in (
        change(2),  # one is missing before it
        Snapshot(coordinator_epoch=8, base_revision=1, revision=2),  # of another coordinator
        change(1, engines=[nameless]),
        change(1, loads=EngineLoads(number=[5])),
    ):
        assert not viewing(entry("a", 1)).take(message)


def test_an_engine_that_left_and_came_back_has_one_entry() -> None:
    view = viewing(entry("a", 1), entry("b", 2))
    assert view.take(change(1, left=["a"], engines=[entry("a", 3)]))
    assert sorted((each.identity.engine_id, each.number) for each in view.engines) == [("a", 3), ("b", 2)]
    assert not view.take(change(2, loads=EngineLoads(number=[1])))


def test_adapters_change_only_when_a_change_holds_them() -> None:
    view = RegistryView()
    view.take(whole(adapters=(Adapter(name="x"),)))
    view.take(change(1))
    assert [adapter.name for adapter in view.adapters] == ["x"]
    view.take(change(2, new_adapters=True))
    assert not view.adapters


def test_loads_that_nobody_asks_for_do_not_pile_up() -> None:
    view = viewing(*(entry(str(number), number) for number in range(1, 51)))
    for number in range(1, 51):  # each message is kept for one row
        view.take(change(number, loads=load_of(loaded(str(number), number))))
    assert len(view._pending) < 50


def test_a_coordinator_of_the_last_release_sends_everything_each_time() -> None:
    view = viewing(entry("a", 0), entry("b", 0))
    assert view.take(whole(entry("b", 0), entry("c", 0), revision=2))
    assert [each.identity.engine_id for each in view.engines] == ["b", "c"]


def test_the_rule_is_that_of_the_last_message():
    view = viewing(entry("a", 1))
    assert view.placement == PlacementRule.PLACEMENT_RULE_UNSPECIFIED
    assert view.take(change(1, placement=PlacementRule.PLACEMENT_RULE_COST))
    assert view.placement == PlacementRule.PLACEMENT_RULE_COST


@pytest.mark.parametrize("is_change", [False, True])
def test_an_engine_without_a_name_is_refused_before_anything_changes(is_change: bool) -> None:
    """Its context would be 0, and the smallest context of the engines is the mesh's: every request was too long."""
    view = viewing(entry("a", 1))
    wrong = [entry("b", 2), entry("", 3)]
    with pytest.raises(ValueError, match="has no name"):
        view.take(change(1, engines=wrong) if is_change else whole(*wrong))
    assert [each.identity.engine_id for each in view.engines] == ["a"]
