"""The overlay for a thousand engines has what the capacity model says."""

from tests.k8s.cluster import Object, build, of_kind, workloads
from tokenloom.bench.scale.capacity import ENGINES_PER_CELL, UTILIZATION, cell, cells
from tokenloom.bench.scale.scale import LIMITS
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.engines.engine_stream import MAX_REPORTS_PER_SECOND, report_interval

LARGE = build("overlays/large")
NEEDED = cell()
MEBIBYTES = {"Mi": 1, "Gi": 1024}


def mebibytes(size: str) -> int:
    return int(size[:-2]) * MEBIBYTES[size[-2:]]


def autoscalers() -> dict[str, Object]:
    found = of_kind(LARGE, "HorizontalPodAutoscaler")
    return {each["spec"]["scaleTargetRef"]["name"]: each["spec"] for each in found}


def test_autoscalers_reach_the_replicas_that_the_cells_streams_need() -> None:
    found = autoscalers()
    assert found["engine"]["maxReplicas"] == NEEDED.engines == ENGINES_PER_CELL
    for name, needed in (
        ("gateway", NEEDED.gateways),
        ("output-processor", NEEDED.output_processors),
        ("tokenizer", NEEDED.tokenizers),
    ):
        assert needed / 2 <= found[name]["minReplicas"] <= needed < found[name]["maxReplicas"] <= needed * 2, name
    (coordinator,) = (each for each in workloads(LARGE) if each.name == "coordinator")
    assert coordinator.source["spec"]["replicas"] == 2  # one of them stands by


def test_autoscalers_aim_for_the_share_that_the_model_assumes() -> None:
    for name, spec in autoscalers().items():
        if name != "engine":
            (metric,) = spec["metrics"]
            assert metric["resource"]["target"]["averageUtilization"] == UTILIZATION * 100


def test_the_coordinator_has_the_memory_that_the_benchmark_allows_it() -> None:
    limits = {limit.figure: limit.most for limit in LIMITS}
    (coordinator,) = (each for each in workloads(LARGE) if each.name == "coordinator")
    resources = coordinator.container["resources"]
    assert resources["requests"] == resources["limits"]
    assert mebibytes(resources["limits"]["memory"]) >= limits["mebibytes"]


def test_a_cell_s_engines_send_as_many_reports_as_a_coordinator_reads() -> None:
    assert ENGINES_PER_CELL / report_interval(ENGINES_PER_CELL) <= MAX_REPORTS_PER_SECOND


def test_a_coordinator_accepts_the_connections_of_its_cell() -> None:
    connections = 2 * NEEDED.engines + NEEDED.gateways + NEEDED.output_processors + NEEDED.tokenizers
    assert connections <= CoordinatorSettings(listen="127.0.0.1:0").grpc_limits.connections / 2, "old and new pods"


def test_a_node_drain_does_not_evict_a_thousand_engines_one_by_one() -> None:
    (budget,) = (each for each in of_kind(LARGE, "PodDisruptionBudget") if each["metadata"]["name"] == "engine")
    assert budget["spec"]["maxUnavailable"].endswith("%")


def test_a_million_streams_take_sixteen_cells() -> None:
    assert cells(1_000_000) == 16
    assert cells(64_000) == 1
