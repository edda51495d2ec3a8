"""Tests placement while the coordinator is away."""

import pytest

from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.output_processor.fakes import entry
from tokenloom.request.errors import Unavailable
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.snapshot_feed import SnapshotFeed
from tokenloom.services.output_processor.placement.last_snapshot import EngineKey, LastSnapshot
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    EngineIdentity,
    EngineReport,
    EngineState,
    PickRequest,
    PlacementRule,
    Snapshot,
    Subset,
    WatchRequest,
)
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
OURS = Fingerprint(model="m", tokenizer=b"t")


def identity(name: str, **fingerprint: object) -> EngineIdentity:
    served = Fingerprint(**{"model": "m", "tokenizer": b"t", **fingerprint})
    return EngineIdentity(engine_id=name, epoch=1, fingerprint=served)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def view(**fields: object) -> RegistryView:
    shown = RegistryView()
    shown.take(Snapshot(**fields))  # type: ignore[arg-type]
    return shown


def fleet(
    *entries: object, complete: bool = True, pd_threshold: int = 0, clock: Clock | None = None, seed: int = 0
) -> LastSnapshot:
    snapshot = LastSnapshot(OURS, clock or Clock(), seed)
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


def prefixed(snapshot: LastSnapshot, prefix: int, suffix: int) -> str:
    """The engine of a prompt of 32 blocks, half of which are the prefix."""
    hashes = [prefix] * 16 + [suffix] * 16
    request = PickRequest(role=PREFILL, prompt_tokens=512, fingerprint=OURS, block_hash_prefixes=hashes)
    return snapshot.pick(request).engine.engine_id


def names(count: int) -> list[str]:
    return [f"engine-{number}" for number in range(count)]


def test_of_two_engines_the_one_with_the_lower_score_counting_own_picks() -> None:
    snapshot = fleet(entry(identity("a"), running=6), entry(identity("b")))
    assert [pick(snapshot, PREFILL) for _ in range(2)] == ["b*", "b*"]
    assert pick(snapshot, PREFILL) == "a*"
    snapshot.release(EngineKey("b", 1))
    assert pick(snapshot, PREFILL) == "b*"


@pytest.mark.parametrize("rule", [PlacementRule.PLACEMENT_RULE_SCORE, PlacementRule.PLACEMENT_RULE_COST])
def test_one_that_waits_weighs_more_than_three_that_run_whichever_rule_the_coordinator_has(rule: PlacementRule) -> None:
    snapshot = LastSnapshot(OURS, Clock())
    engines = [entry(identity("a"), waiting=1), entry(identity("b"), running=3)]
    snapshot.update(view(engines=engines, complete=True, placement=rule))
    assert pick(snapshot, PREFILL) == "b*"


def test_a_prefix_has_two_homes_which_all_processes_know() -> None:
    for prefix in range(1, 40):
        seen = set()
        for seed in range(3):
            snapshot = fleet(*(entry(identity(name)) for name in names(16)), seed=seed)
            seen |= {prefixed(snapshot, prefix, suffix) for suffix in (100, 200)}
        assert len(seen) == 2


def test_an_engine_that_leaves_moves_its_own_prefixes_only() -> None:
    before = [prefixed(fleet(*map(entry, map(identity, names(16)))), prefix, 1) for prefix in range(1, 100)]
    after = [prefixed(fleet(*map(entry, map(identity, names(15)))), prefix, 1) for prefix in range(1, 100)]
    moved = [one for one, other in zip(before, after, strict=True) if one != other]
    assert set(moved) == {"engine-15"}
    assert len(set(before)) == 16


def test_homes_with_too_much_to_do_are_passed_over_for_longer_prefixes() -> None:
    snapshot = fleet(*(entry(identity(name)) for name in names(16)))
    placed = [prefixed(snapshot, 7, suffix) for suffix in range(100, 164)]
    assert max(placed.count(name) for name in names(16)) <= 8


def test_without_a_prefix_processes_with_the_same_snapshot_choose_different_engines() -> None:
    first = {pick(fleet(*(entry(identity(name)) for name in names(16)), seed=seed), PREFILL) for seed in range(1, 65)}
    assert len(first) >= 12


def test_the_loads_of_a_snapshot_are_forgotten_while_own_picks_are_not() -> None:
    clock = Clock()
    snapshot = fleet(entry(identity("a"), running=40), entry(identity("b")), clock=clock)
    assert pick(snapshot, PREFILL) == "b*"
    clock.now = 30.0
    assert pick(snapshot, PREFILL) == "a*"


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
    registry = Registry(7, lambda: 0.0, policy=DEFAULT_POLICY)
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
    near = set(subset.choose(names, ReplicaPosition(3, 10), 8))
    draining = identity("d")
    snapshot = fleet(
        *(entry(identity(name)) for name in names), entry(draining, state=EngineState.ENGINE_STATE_DRAINING)
    )
    request = PickRequest(role=BOTH, prompt_tokens=10, fingerprint=OURS, subset=wanted)
    assert {snapshot.pick(request).engine.engine_id for _ in range(40)} == near
    failed = [EngineKey(name, 1) for name in near]
    assert snapshot.pick(request, failed).engine.engine_id not in near


def test_the_engine_that_a_request_prefers_is_used_as_the_coordinator_does() -> None:
    snapshot = fleet(*(entry(identity(name)) for name in ("a", "b")), entry(identity("c"), role=PREFILL))
    request = PickRequest(role=BOTH, prompt_tokens=10, fingerprint=OURS, preferred_engine="b")
    assert [snapshot.pick(request).engine.engine_id for _ in range(5)] == ["b"] * 5
    assert snapshot.pick(request, [EngineKey("b", 1)]).engine.engine_id == "a"
    for name in ("c", "not-there"):
        request.preferred_engine = name
        assert {snapshot.pick(request).engine.engine_id for _ in range(9)} <= {"a", "b"}


def test_a_prefix_is_placed_where_the_coordinator_has_placed_it_until_that_engine_has_too_much_to_do() -> None:
    registry = Registry(1, Clock(), policy=DEFAULT_POLICY, settle_seconds=0)
    feed = SnapshotFeed(registry)
    for name in names(16):
        served = identity(name, block_size=16)
        served.num_kv_blocks = 1000
        registry.join(served, EngineReport(role=BOTH, state=EngineState.ENGINE_STATE_SERVING, free_kv_blocks=1000))
    request = PickRequest(role=PREFILL, prompt_tokens=512, fingerprint=OURS, block_hash_prefixes=range(100, 132))
    (log, revision), followed = (feed.log(WatchRequest(changes=True)), None), RegistryView()
    snapshot = LastSnapshot(OURS, Clock())

    def follow(revision: int | None) -> int:
        for published in log.after(revision):
            revision = published.revision
            assert followed.take(Snapshot.FromString(published.data))
        snapshot.update(followed)
        return log.revision

    revision = follow(revision)
    holder = registry.pick(request).engine.engine_id
    feed.publish(1.0)
    follow(revision)
    placed = [snapshot.pick(request).engine.engine_id for _ in range(12)]
    assert placed[:2] == [holder] * 2
    assert set(placed) != {holder}
    again = LastSnapshot(OURS, Clock())
    late = RegistryView()
    (everything,) = log.after(None)
    late.take(Snapshot.FromString(everything.data))
    again.update(late)
    assert again.pick(request).engine.engine_id == holder, "one that begins to watch learns it too"


def test_a_request_goes_on_at_a_server_of_others_only_where_the_coordinator_allows_it() -> None:
    ours, theirs = (identity(name, numerics=name, block_size=16) for name in ("cpu/float32", "vllm/0.32.0"))
    for mixes in (False, True):
        snapshot = LastSnapshot(OURS, Clock())
        snapshot.update(view(engines=[entry(theirs)], complete=True, mixes_numerics=mixes))
        assert not snapshot.had_own
        assert pick(snapshot, PREFILL) == "vllm/0.32.0*", "a new request"
        if mixes:
            assert pick(snapshot, PREFILL, pool=ours.fingerprint) == "vllm/0.32.0*"
        else:
            for pool in (ours.fingerprint, Fingerprint(numerics="cpu/float32")):  # all that a takeover may know
                with pytest.raises(Unavailable):
                    pick(snapshot, PREFILL, pool=pool)
        snapshot.update(view(engines=[entry(ours)], complete=True, mixes_numerics=mixes))
        assert snapshot.had_own
        snapshot.update(view(engines=[entry(theirs)], complete=True, mixes_numerics=mixes))
        assert snapshot.had_own, "it may come back"


def test_an_engine_that_is_named() -> None:
    others = entry(identity("other", model="n")), entry(identity("first", numerics="x"), role=PREFILL)
    snapshot = fleet(entry(identity("a")), entry(identity("b"), role=DECODE), *others)
    request = PickRequest(role=DECODE, prompt_tokens=10, fingerprint=OURS)
    for name in ("a", "b"):
        assert snapshot.named(request, name).engine.engine_id == name
    assert pick(snapshot, DECODE) == "b", "both have a leg more"
    for name in ("other", "first", "c"):
        with pytest.raises(Unavailable, match=f"No engine {name} serves what this request needs"):
            snapshot.named(request, name)
