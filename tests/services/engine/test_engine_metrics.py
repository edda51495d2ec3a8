"""Metrics of logits and drafts exist where they are asked for, and only there."""

import pytest
from prometheus_client import CollectorRegistry

from tests.services.engine.peer import make_add
from tests.services.engine.streams.test_attempts import make_attempts
from tokenloom.engine_core.config import SpeculativeConfig
from tokenloom.engine_core.wire.draft_counts import SpecDecodingStats
from tokenloom.engine_core.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    LogitsStats,
    SchedulerStats,
)
from tokenloom.services.engine.engine_metrics import EngineMetrics

NAMES = [
    "tokenloom_logits_max",
    "tokenloom_logits_min",
    "tokenloom_logits_entropy_nats",
    "tokenloom_temperature",
]


def names_of(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


def test_without_the_option_there_are_none() -> None:
    off, on = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(off, "m", "e")
    EngineMetrics(on, "m", "e", logits=True)
    assert names_of(on) - names_of(off) == set(NAMES)


def _count(registry: CollectorRegistry, name: str, labels: dict[str, str]) -> float | None:
    return registry.get_sample_value(f"{name}_bucket", labels)


@pytest.mark.parametrize("logits", [False, True])
def test_measured_logits_are_observed(logits: bool) -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e", logits=logits)
    attempts, _ = make_attempts()
    attempt = attempts.open(make_add(1, [1]))
    metrics.observe_output(attempt, EngineCoreOutput("7.1", [4]), 1.0)
    stats = LogitsStats(max=12.0, min=-7.0, entropy=0.4, temperature=0.7)
    metrics.observe_output(attempt, EngineCoreOutput("7.1", [5], 1, logits_stats=stats), 2.0)
    labels = {"model_name": "m", "engine": "e"}
    bounds = zip(NAMES, (("10.0", "20.0"), ("-10.0", "-5.0"), ("0.3", "0.5"), ("0.6", "0.7")), strict=True)
    found = [[_count(registry, name, {**labels, "le": bound}) for bound in pair] for name, pair in bounds]
    assert found == [[0, 1] if logits else [None, None]] * 4


def test_drafts_are_counted_as_in_vllm() -> None:
    off, registry = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(off, "m", "e")
    metrics = EngineMetrics(registry, "m", "e", speculative=SpeculativeConfig("ngram", 2))
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    assert names_of(registry) - names_of(off) == {f"vllm:spec_decode_{name}" for name in names}

    def values() -> list[float | None]:
        labels = {"model_name": "m", "engine": "e"}
        *totals, per_position = (f"vllm:spec_decode_{name}_total" for name in names)
        positions = [registry.get_sample_value(per_position, {**labels, "position": str(n)}) for n in range(2)]
        return [registry.get_sample_value(name, labels) for name in totals] + positions

    assert values() == [0, 0, 0, 0, 0]
    stats = SchedulerStats(spec_decoding=SpecDecodingStats(5, 9, 4, [3, 1]))
    metrics.observe_step(EngineCoreOutputs(1, [], stats))
    assert values() == [5, 9, 4, 3, 1]
