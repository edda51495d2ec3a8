"""Tests what snapshots show of the rule ``cost``: what a pick would compare."""

import numpy as np
import pytest

from tests.services.coordinator.engines.test_engine_placement import Clock, identity, report, request
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.runtime.placement.pool import BATCH_STEPS
from tokenloom.services.runtime.placement.rules import RULES
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineState, PlacementRule
from tokenloom.v1.types_pb2 import EngineRole

DECODE = EngineRole.ENGINE_ROLE_DECODE
SPEED = {"computed_tokens_per_second": 1000.0, "step_seconds": 0.02, "seats": 10}


def make(rule: str) -> Registry:
    return Registry(1, Clock(), policy=Policy(PD_THRESHOLD, RULES[rule]), settle_seconds=0)


def shown(registry: Registry) -> dict[str, EngineEntry]:
    return {entry.identity.engine_id: entry for entry in snapshot_of(registry).engines}


def test_the_seconds_are_those_of_the_requests_that_are_there() -> None:
    registry = make("cost")
    for name, running in (("a", 4), ("b", 4)):
        registry.join(identity(name), report(running=running, prefilling_tokens=500, free_kv_blocks=100, **SPEED))
    engine = shown(registry)["a"]
    assert registry.placement == PlacementRule.PLACEMENT_RULE_COST
    assert (engine.score, engine.uncached_tokens, engine.uncached_tokens_per_second) == (4, 500, 1000.0)
    assert engine.expected_seconds == pytest.approx(500 / 1000 + BATCH_STEPS * 0.02 * 4 / 10)


def test_a_pick_and_a_report_change_them() -> None:
    registry = make("cost")
    record = registry.join(identity("a"), report(**SPEED))
    assert shown(registry)["a"].expected_seconds == 0
    registry.pick(request(300))
    picked = shown(registry)["a"]
    assert (picked.uncached_tokens, picked.expected_seconds) == (300, pytest.approx(0.3 + BATCH_STEPS * 0.02 / 10))
    registry.report(record, report(running=5, **{**SPEED, "computed_tokens_per_second": 3000.0}))
    assert shown(registry)["a"].expected_seconds == pytest.approx(300 / 3000 + BATCH_STEPS * 0.02 * 6 / 10)


def test_loads_show_what_entries_show() -> None:
    registry = make("cost")
    for number in range(3):
        registry.join(identity(f"e{number}"), report(running=number, prefilling_tokens=100 * number, **SPEED))
    loads = registry.loads({f"e{number}": number for number in range(3)})
    entries = shown(registry)
    for number in range(3):
        entry = entries[f"e{number}"]
        assert loads.uncached_tokens[number] == entry.uncached_tokens
        assert loads.uncached_tokens_per_second[number] == entry.uncached_tokens_per_second
        assert loads.expected_seconds[number] == entry.expected_seconds


def test_engines_are_compared_with_those_of_their_pool_and_use() -> None:
    registry = make("cost")
    registry.join(identity("a"), report(running=1, **SPEED))
    registry.join(identity("b", model="other"), report(running=9, **SPEED))
    registry.join(identity("d", model="other"), report(running=9, role=DECODE, **SPEED))
    registry.join(identity("p"), report(running=9, state=EngineState.ENGINE_STATE_DRAINING, **SPEED))
    seconds = {name: entry.expected_seconds for name, entry in shown(registry).items()}
    alone = BATCH_STEPS * 0.02 / 10
    expected = {"a": alone, "b": 9 * alone, "d": 9 * alone, "p": 0}
    assert seconds == pytest.approx(expected), "no mean is that of another model, and a draining engine gets nothing"


def test_by_score_nothing_is_computed_or_sent() -> None:
    registry = make("score")
    registry.join(identity("a"), report(running=1, prefilling_tokens=100, **SPEED))
    assert registry.placement == PlacementRule.PLACEMENT_RULE_SCORE
    entry, loads = shown(registry)["a"], registry.loads({"a": 1})
    for name in ("uncached_tokens", "uncached_tokens_per_second", "expected_seconds"):
        assert not getattr(entry, name)
        assert not getattr(loads, name)


def test_the_columns_are_computed_once_for_a_revision() -> None:
    registry = make("cost")
    registry.join(identity("a"), report(**SPEED))
    assert registry._costs is not None
    first = shown(registry) and registry._costs.seconds
    assert (shown(registry) and registry._costs.seconds) is first
    registry.pick(request())
    assert not np.array_equal(shown(registry) and registry._costs.seconds, first)
