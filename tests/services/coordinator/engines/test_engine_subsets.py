"""Tests which engines a pick considers when it names the subset of its output processor."""

from collections import Counter

import pytest

from tests.services.coordinator.engines.test_engine_placement import EPOCH, Clock, identity, picked, report, request
from tests.services.coordinator.policies import DEFAULT_POLICY
from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.v1.coordinator_pb2 import EngineRef, EngineState, PickRequest, Subset
from tokenloom.v1.types_pb2 import EngineRole

NAMES = [f"engine-{number:02}" for number in range(40)]
PLACE, SIZE = ReplicaPosition(3, 10), 8
NEAR = subset.choose(NAMES, PLACE, SIZE)


def near(**fields: object) -> PickRequest:
    return request(**{"subset": Subset(index=PLACE.index, count=PLACE.count, size=SIZE), **fields})  # type: ignore[arg-type]


@pytest.fixture
def registry() -> Registry:
    registry = Registry(EPOCH, Clock(), policy=DEFAULT_POLICY)
    for name in NAMES:
        registry.join(identity(name), report())
    return registry


def test_picks_spread_over_the_subset_alone(registry: Registry) -> None:
    chosen = Counter(picked(registry.pick(near())) for _ in range(2 * len(NEAR)))
    assert chosen == dict.fromkeys(NEAR, 2)
    assert len(NEAR) == SIZE < len(NAMES)


def test_a_busy_engine_of_the_subset_comes_before_an_idle_one_outside(registry: Registry) -> None:
    for name in NEAR:
        registry.join(identity(name, epoch=2), report(waiting=3))
    assert picked(registry.pick(near())) in NEAR


def test_another_engine_is_picked_when_only_it_has_room(registry: Registry) -> None:
    for name in NEAR:
        registry.join(identity(name, epoch=2), report(kv_usage=1.0))
    assert picked(registry.pick(near())) not in NEAR


def test_without_room_anywhere_the_subset_is_kept(registry: Registry) -> None:
    for name in NAMES:
        registry.join(identity(name, epoch=2), report(kv_usage=1.0))
    assert picked(registry.pick(near())) in NEAR


def test_another_engine_is_picked_when_the_whole_subset_is_excluded(registry: Registry) -> None:
    failed = [EngineRef(engine_id=name, epoch=1) for name in NEAR]
    assert picked(registry.pick(near(exclude=failed))) not in NEAR


def test_the_next_engine_replaces_one_that_drains(registry: Registry) -> None:
    registry.join(identity(NEAR[0], epoch=2), report(state=EngineState.ENGINE_STATE_DRAINING))
    left = [name for name in NAMES if name != NEAR[0]]
    chosen = {picked(registry.pick(near())) for _ in range(100)}
    assert chosen == set(subset.choose(left, PLACE, SIZE))
    assert len(chosen - set(NEAR)) <= 2


def test_each_role_has_a_subset_of_its_own() -> None:
    registry = Registry(EPOCH, Clock(), policy=DEFAULT_POLICY)
    roles = [EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE]
    for role in roles:
        for number in range(20):
            registry.join(identity(f"{role}-{number}"), report(role=role))
    for role in roles:
        chosen = {picked(registry.pick(near(role=role, prompt_tokens=600))) for _ in range(SIZE)}
        assert chosen == set(subset.choose([f"{role}-{number}" for number in range(20)], PLACE, SIZE))


def test_queries_are_placed_among_all_engines(registry: Registry) -> None:
    places = [Subset(index=index, count=10, size=SIZE) for index in range(10)]
    chosen = {picked(registry.pick(near(query_id="q", pools=True, subset=place))) for place in places}
    assert len(chosen) == 1


def test_a_mesh_that_fits_is_used_in_whole(registry: Registry) -> None:
    whole = Subset(index=3, count=10, size=len(NAMES))
    assert {picked(registry.pick(near(subset=whole))) for _ in NAMES} == set(NAMES)


@pytest.mark.parametrize("wrong", [Subset(index=2, count=2, size=1), Subset(index=0, count=1)])
def test_a_subset_that_cannot_be_is_refused(registry: Registry, wrong: Subset) -> None:
    with pytest.raises(InvalidArgument, match="subset"):
        registry.pick(near(subset=wrong))


def test_without_any_engine_the_error_is_that_of_the_pool() -> None:
    with pytest.raises(Unavailable, match="No engine"):
        Registry(EPOCH, Clock(), policy=DEFAULT_POLICY).pick(near())


def test_the_engine_that_a_request_prefers_comes_before_its_subset(registry: Registry) -> None:
    preferred = next(name for name in NAMES if name not in NEAR)
    registry.join(identity(preferred, epoch=2), report(waiting=9))
    assert {picked(registry.pick(near(preferred_engine=preferred))) for _ in range(9)} == {preferred}
    assert picked(registry.pick(near(preferred_engine="not-there"))) in NEAR
    failed = [EngineRef(engine_id=preferred, epoch=2)]
    assert picked(registry.pick(near(preferred_engine=preferred, exclude=failed))) != preferred
    registry.join(identity(preferred, epoch=3), report(kv_usage=1.0))
    assert picked(registry.pick(near(preferred_engine=preferred))) != preferred, "only others have room"
    registry.join(identity(preferred, epoch=4), report(state=EngineState.ENGINE_STATE_DRAINING))
    assert picked(registry.pick(near(preferred_engine=preferred))) != preferred


def test_an_engine_of_one_role_is_not_preferred() -> None:
    """Alone it would prefill and find none to hand the KV to."""
    registry = Registry(EPOCH, Clock(), policy=DEFAULT_POLICY)
    for role in (EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE):
        for number in range(2):
            registry.join(identity(f"{role}-{number}"), report(role=role))
    wanted = request(role=EngineRole.ENGINE_ROLE_PREFILL, prompt_tokens=600, preferred_engine="2-1")
    answers = [registry.pick(wanted) for _ in range(2)]
    assert {picked(each) for each in answers} == {f"{EngineRole.ENGINE_ROLE_PREFILL}-{number}" for number in range(2)}
    assert not any(each.whole_request for each in answers)
