"""/metrics over HTTP."""

import asyncio
import os
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.peers import addresses
from tokenloom.services.runtime.telemetry import process_metrics


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read().decode()


@pytest.fixture
def registry() -> CollectorRegistry:
    return process_metrics.new_registry()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_serves_process_and_own_metrics(registry: CollectorRegistry, host: str) -> None:
    process_metrics.gauge(registry, "num_requests_running", "Requests in the batch.", ["model_name"]).labels("m").set(3)
    process_metrics.counter(registry, "prompt_tokens", "Tokens.").inc(2)
    process_metrics.histogram(
        registry, "e2e_request_latency_seconds", "Time.", {}, process_metrics.REQUEST_SECONDS
    ).observe(0.4)
    server = process_metrics.MetricsServer(registry, addresses.parse(f"{host}:0"))
    try:
        text = await asyncio.to_thread(get, f"http://{server.address}/metrics")
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(get, f"http://{server.address}/other")
        caught.value.close()
    finally:
        server.close()
    assert 'vllm:num_requests_running{model_name="m"} 3.0' in text
    assert "vllm:prompt_tokens_total 2.0" in text
    assert 'vllm:e2e_request_latency_seconds_bucket{le="0.5"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    assert "process_cpu_seconds_total" in text


def test_another_process_is_shown_while_there_is_one(registry: CollectorRegistry) -> None:
    pid: int | None = None
    process_metrics.observe_process(registry, "tokenloom_engine_core", lambda: pid)
    name = "tokenloom_engine_core_process_cpu_seconds_total"
    assert registry.get_sample_value(name) is None
    pid = os.getpid()
    seconds = registry.get_sample_value(name)
    assert seconds is not None
    assert seconds > 0
