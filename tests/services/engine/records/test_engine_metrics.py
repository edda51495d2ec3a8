"""Metrics of logits and drafts exist where they are asked for, and only there."""

import pytest
from prometheus_client import CollectorRegistry

from tests.services.engine.peer import make_add
from tests.services.engine.streams.test_attempts import make_attempts
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ExpertBalance,
    ExpertLoads,
    LogitsStats,
    SchedulerStats,
)
from tokenloom.services.engine.records.engine_metrics import EngineMetrics

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


def test_prompt_tokens_in_the_queue_are_shown() -> None:
    """Prefill engines are scaled on them (k8s/overlays/disaggregated)."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e")
    metrics.observe_step(EngineCoreOutputs(scheduler_stats=SchedulerStats(num_waiting=2, num_waiting_tokens=9000)))
    assert registry.get_sample_value("tokenloom_prompt_tokens_waiting", {"model_name": "m", "engine": "e"}) == 9000


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


@pytest.mark.parametrize("experts_per_token", [0, 4])
def test_loads_are_shown_for_models_with_experts(experts_per_token: int) -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e")
    ready = CoreReady(8, 64, 100, 16, "layout", "numerics", experts_per_token=experts_per_token)
    metrics.observe_ready(ready, enable_prefix_caching=True)
    metrics.observe_step(EngineCoreOutputs(expert_loads=ExpertLoads([5, 0, 7], [1.75, 1.0])))
    labels = {"model_name": "m", "engine": "e"}
    tokens = [
        registry.get_sample_value("tokenloom_expert_tokens_total", {**labels, "expert": str(i)}) for i in range(3)
    ]
    balance = [registry.get_sample_value("tokenloom_expert_imbalance", {**labels, "layer": str(i)}) for i in range(2)]
    assert (tokens, balance) == (([5, 0, 7], [1.75, 1.0]) if experts_per_token else ([None] * 3, [None] * 2))
    assert registry.get_sample_value("tokenloom_expert_balancedness", labels) is None


def test_the_balance_of_ranks_is_shown_where_experts_move() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e")
    metrics.observe_ready(CoreReady(8, 64, 100, 16, "layout", "n", experts_per_token=2), enable_prefix_caching=True)
    metrics.observe_step(EngineCoreOutputs(expert_loads=ExpertLoads([5], [1.0], ExpertBalance(0.75, 3, 8))))
    names = ("tokenloom_expert_balancedness", "tokenloom_expert_plans_total", "tokenloom_experts_moved_total")
    assert [registry.get_sample_value(name, {"model_name": "m", "engine": "e"}) for name in names] == [0.75, 3, 8]


def test_what_the_conventions_name_is_shown_under_that_name_too() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, "m", "e")
    labels = {"gen_ai_operation_name": "generate", "gen_ai_provider_name": "tokenloom"}
    labels |= {"gen_ai_request_model": "m", "engine": "e"}
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert registry.get_sample_value(f"gen_ai_server_{name}_seconds_count", labels) == 0
