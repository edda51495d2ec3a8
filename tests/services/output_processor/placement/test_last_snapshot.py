"""Tests placement while the coordinator is away."""

import pytest

from tests.services.output_processor.fakes import entry
from tokenloom.request.errors import Unavailable
from tokenloom.services.coordinator.engine_registry import Registry
from tokenloom.services.output_processor.placement.last_snapshot import EngineKey, LastSnapshot
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.registry_view import RegistryView
from tokenloom.services.runtime.peers.subset import Position
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineState, PickRequest, Snapshot, Subset
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
OURS = Fingerprint(model="m", tokenizer=b"t")


def identity(name: str, **fingerprint: object) -> EngineIdentity:
    served = Fingerprint(**{"model": "m", "tokenizer": b"t", **fingerprint})
    return EngineIdentity(engine_id=name, epoch=1, fingerprint=served)


def view(**fields: object) -> RegistryView:
    shown = RegistryView()
    shown.take(Snapshot(**fields))  # type: ignore[arg-type]
    return shown


def fleet(*entries: object, complete: bool = True, pd_threshold: int = 0) -> LastSnapshot:
    snapshot = LastSnapshot(OURS)
    snapshot.update(view(engines=entries, complete=complete, pd_threshold=pd_threshold))
    return snapshot


def pick(
    snapshot: LastSnapshot, leg: EngineRole, prompt_tokens: int = 10, *exclude: str, pool: Fingerprint = OURS
) -> str:
    """The engine's name, with a ``*`` when it does the whole request."""
    keys = [EngineKey(name, 1) for name in exclude]
    picked = snapshot.pick(PickRequest(role=leg, prompt_tokens=prompt_tokens, fingerprint=pool), keys)
    assert not picked.HasField("pick")
    return picked.engine.engine_id + "*" * picked.whole_request


def test_lowest_score_with_its_own_picks_then_in_turn() -> None:
    snapshot = fleet(entry(identity("a"), waiting=1), entry(identity("b")), entry(identity("c")))
    assert [pick(snapshot, PREFILL) for _ in range(4)] == ["b*", "c*", "a*", "b*"]
    snapshot.release(EngineKey("c", 1))
    assert pick(snapshot, PREFILL) == "c*"


def test_legs_go_by_role_and_short_prompts_whole() -> None:
    snapshot = fleet(entry(identity("p"), role=PREFILL), entry(identity("d"), role=DECODE), pd_threshold=8)
    assert [pick(snapshot, PREFILL, 8), pick(snapshot, DECODE, 8), pick(snapshot, PREFILL, 7)] == ["p", "d", "d*"]
    assert [pick(snapshot, PREFILL, 8, "p"), pick(snapshot, DECODE, 8, "d")] == ["d*", "p"]


def test_a_decode_leg_stays_in_the_pool_of_the_first() -> None:
    old, new = identity("old", weights=b"1"), identity("new", weights=b"2")
    snapshot = fleet(entry(old, role=DECODE), entry(new, role=DECODE))
    assert {pick(snapshot, DECODE, pool=new.fingerprint) for _ in range(3)} == {"new"}


def test_without_a_serving_engine_a_pick_is_unavailable() -> None:
    snapshot = fleet(entry(identity("other", model="x")), entry(identity("a"), state=EngineState.ENGINE_STATE_DRAINING))
    with pytest.raises(Unavailable) as caught:
        pick(snapshot, PREFILL)
    assert caught.value.retry_after


def test_a_complete_view_is_kept_while_engines_rejoin() -> None:
    snapshot = fleet(entry(identity("a")))
    snapshot.update(view(complete=False))
    assert pick(snapshot, PREFILL) == "a*"
    snapshot.update(view(complete=True))
    with pytest.raises(Unavailable):
        pick(snapshot, PREFILL)


def test_a_coordinator_that_is_replaced_while_young_is_remembered() -> None:
    snapshot = fleet(complete=False)
    snapshot.update(view(coordinator_epoch=1, complete=False, engines=[entry(identity("a"))]))
    snapshot.update(view(coordinator_epoch=2, complete=False))
    assert pick(snapshot, PREFILL) == "a*"
    snapshot.update(view(coordinator_epoch=2, complete=True))
    with pytest.raises(Unavailable):
        pick(snapshot, PREFILL)


def test_before_a_complete_one_an_incomplete_snapshot_is_better_than_none() -> None:
    assert pick(fleet(entry(identity("a")), complete=False), PREFILL) == "a*"


def test_a_query_goes_where_the_coordinator_placed_it() -> None:
    registry = Registry(7, lambda: 0.0)
    engines = [identity(name) for name in "abc"]
    for engine in engines:
        engine.limits.max_model_len = 64
        registry.join(engine, entry(engine).report)
    snapshot = fleet(*(entry(engine) for engine in reversed(engines)))
    for number in range(16):
        query = PickRequest(role=PREFILL, prompt_tokens=3, pools=True, query_id=f"q{number}", fingerprint=OURS)
        assert snapshot.pick(query).engine == registry.pick(query).engine


def test_requests_with_an_adapter_go_to_the_engines_that_have_it() -> None:
    having, other = entry(identity("a"), waiting=10), entry(identity("b"))
    having.report.adapters.add(name="pirate", digest=b"p")
    snapshot = fleet(having, other)
    request = PickRequest(role=BOTH, prompt_tokens=10, fingerprint=OURS, adapter=b"p")
    assert [snapshot.pick(request).engine.engine_id for _ in range(3)] == ["a", "a", "a"]
    with pytest.raises(Unavailable):
        snapshot.pick(PickRequest(role=BOTH, prompt_tokens=10, fingerprint=OURS, adapter=b"other"))


def test_a_subset_is_used_as_the_coordinator_does() -> None:
    names = [f"engine-{number}" for number in range(40)]
    wanted = Subset(index=3, count=10, size=8)
    near = set(subset.choose(names, Position(3, 10), 8))
    draining = identity("d")
    snapshot = fleet(
        *(entry(identity(name)) for name in names), entry(draining, state=EngineState.ENGINE_STATE_DRAINING)
    )
    request = PickRequest(role=BOTH, prompt_tokens=10, fingerprint=OURS, subset=wanted)
    assert {snapshot.pick(request).engine.engine_id for _ in range(40)} == near
    failed = [EngineKey(name, 1) for name in near]
    assert snapshot.pick(request, failed).engine.engine_id not in near
