"""The gateway remembers a bounded time of its traffic."""

from prometheus_client import CollectorRegistry

from tests.loop_clock import pass_time
from tokenloom.services.gateway.http.response_counts import ResponseCounts
from tokenloom.services.gateway.mesh.mesh_view import MeshLoad
from tokenloom.services.gateway.metrics.gateway_metrics import GatewayMetrics
from tokenloom.services.gateway.metrics.usage_counts import AdapterUsage, KeyUsage
from tokenloom.services.gateway.page.traffic import INTERVAL_SECONDS, NUM_INTERVALS, Traffic
from tokenloom.v1 import inference_pb2

LOAD = MeshLoad(num_running=1, num_waiting=2, kv_usage=0.5)


def gateway_metrics(registry: CollectorRegistry) -> GatewayMetrics:
    return GatewayMetrics(registry, "m", KeyUsage(registry), AdapterUsage(registry))


async def test_an_interval_compares_the_counters() -> None:
    registry = CollectorRegistry()
    metrics, counts = (
        gateway_metrics(registry),
        ResponseCounts(registry),
    )
    traffic = Traffic(metrics, counts, lambda: LOAD)
    for _ in range(2):
        metrics.generation_tokens.inc(50)
        metrics.inter_token_latency.observe(0.02)
        counts.count("/v1/completions", 503, "RESOURCE_EXHAUSTED")
        metrics.observe_miss(inference_pb2.CacheMiss(cause=inference_pb2.MISS_CAUSE_EVICTED, missed_tokens=32))
        metrics.observe_miss(inference_pb2.CacheMiss())
        pass_time(10.0)
        traffic.end_interval()
    traffic.end_interval()
    columns = traffic.columns()
    rates = columns["output_tokens_per_second"]
    assert isinstance(rates, list)
    assert [round(rate) for rate in rates] == [5, 5, 0]
    assert columns["itl_p50_ms"] == [15.0, 15.0, None]
    assert columns["hit_share"] == [None, None, None]
    assert columns["refused"] == [{"RESOURCE_EXHAUSTED": 1}, {"RESOURCE_EXHAUSTED": 1}, {}]
    assert columns["missed"] == [{"evicted": 32}, {"evicted": 32}, {}]
    assert columns["interval_seconds"] == INTERVAL_SECONDS


async def test_older_intervals_are_dropped() -> None:
    registry = CollectorRegistry()
    traffic = Traffic(
        gateway_metrics(registry),
        ResponseCounts(registry),
        lambda: LOAD,
    )
    for _ in range(NUM_INTERVALS + 5):
        traffic.end_interval()
    columns = traffic.columns()
    assert columns["running"] == [1] * NUM_INTERVALS
    assert {len(column) for column in columns.values() if isinstance(column, list)} == {NUM_INTERVALS}
