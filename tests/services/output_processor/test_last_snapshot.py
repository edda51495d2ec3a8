"""Placement while the coordinator is away: its score, with the picks made since."""

import pytest
from tokenloom.services.output_processor.last_snapshot import EngineKey, LastSnapshot
from tokenloom.services.runtime.errors import Unavailable
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineRole, EngineState, Snapshot
from tokenloom.v1.types_pb2 import Fingerprint, ModelLimits

from tests.services.output_processor.fakes import entry

FINGERPRINT = Fingerprint(model="m", tokenizer=b"t")


def engine(name: str, score: int = 0, *, model: str = "m", max_model_len: int = 100, **fields: object) -> EngineEntry:
    fingerprint = Fingerprint(model=model, tokenizer=b"t", weights=b"w", block_size=16)
    limits = ModelLimits(max_model_len=max_model_len, vocab_size=10)
    identity = EngineIdentity(engine_id=name, epoch=1, fingerprint=fingerprint, limits=limits)
    return entry(identity, score, **fields)  # type: ignore[arg-type]


def view(*engines: EngineEntry, complete: bool = True) -> LastSnapshot:
    last = LastSnapshot(FINGERPRINT)
    last.update(Snapshot(complete=complete, engines=engines))
    return last


def picks(last: LastSnapshot, count: int) -> list[str]:
    return [last.pick().engine_id for _ in range(count)]


def test_the_lowest_score_wins_with_own_picks_added() -> None:
    assert picks(view(engine("a", 9), engine("b", 0)), 4) == ["b", "b", "b", "a"]  # 0, 4, 8 and then 9 against 12


def test_ties_rotate() -> None:
    assert sorted(picks(view(*map(engine, "abcd")), 8)) == sorted("aabbccdd")
    assert picks(view(*map(engine, "abc")), 3) == ["a", "b", "c"]


def test_a_released_pick_counts_no_more() -> None:
    last = view(engine("a", 0), engine("b", 1))
    assert picks(last, 1) == ["a"]
    last.release(EngineKey("a", 1))
    assert picks(last, 1) == ["a"]


def test_releasing_what_an_older_snapshot_counted_does_no_harm() -> None:
    last = view(engine("a"), engine("b"))
    picks(last, 2)
    last.update(Snapshot(complete=True, engines=[engine("a"), engine("b", 1)]))
    last.release(EngineKey("a", 1))
    assert picks(last, 2) == ["a", "b"]


def test_only_serving_engines_of_the_same_model_that_are_not_excluded() -> None:
    prefill = engine("prefill")
    prefill.report.role = EngineRole.ENGINE_ROLE_PREFILL
    last = view(
        engine("draining", state=EngineState.ENGINE_STATE_DRAINING),
        engine("other", model="n"),
        prefill,
        engine("good", 50),
    )
    assert picks(last, 2) == ["good", "good"]
    with pytest.raises(Unavailable):
        last.pick([EngineKey("good", 1)])


def test_an_incomplete_snapshot_replaces_no_complete_one() -> None:
    last = view(engine("a"))
    last.update(Snapshot(complete=False))
    assert picks(last, 1) == ["a"]
    last.update(Snapshot(complete=True, engines=[engine("b")]))
    assert picks(last, 1) == ["b"]


def test_a_coordinator_that_is_replaced_while_young_is_remembered() -> None:
    last = view(complete=False)
    last.update(Snapshot(coordinator_epoch=1, complete=False, engines=[engine("a")]))
    last.update(Snapshot(coordinator_epoch=2, complete=False))
    assert last.pick().engine_id == "a"
    last.update(Snapshot(coordinator_epoch=2, complete=True))
    with pytest.raises(Unavailable):
        last.pick()


def test_before_a_complete_one_an_incomplete_snapshot_is_better_than_none() -> None:
    last = view(engine("a"), complete=False)
    assert picks(last, 1) == ["a"]


def test_limits_are_the_widest_engines() -> None:
    assert LastSnapshot(FINGERPRINT).limits is None
    limits = view(
        engine("a", max_model_len=50), engine("b", max_model_len=80), engine("c", model="n", max_model_len=99)
    ).limits
    assert limits is not None
    assert limits.max_model_len == 80
