"""The names and values of metrics do not depend on the format that the scraper asks for."""

import pytest
from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import TracedHistogram
from tokenloom.services.runtime.telemetry.metrics_server import metrics_page

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus 2 sends."""
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1"
)
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    process_metrics.counter(registry, "prompt_tokens", "Tokens.").inc(2)
    times = TracedHistogram(registry, "vllm:time_seconds", "Time.", {"model_name": "m"}, (1, 2))
    times.observe(0.25)
    times.observe_traced(1.5, TRACE)
    times.observe_traced(0.5, "")
    return registry


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "application/openmetrics-text", PROMETHEUS, PROMETHEUS_3])
def test_names_have_their_colon_in_every_format(registry: CollectorRegistry, accept: str) -> None:
    page, content_type = metrics_page(registry, accept)
    assert b"\nvllm:prompt_tokens_total 2.0\n" in page
    assert b"vllm_" not in page
    assert content_type.startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain")


def test_openmetrics_has_exemplars_and_text_has_none(registry: CollectorRegistry) -> None:
    page = metrics_page(registry, PROMETHEUS)[0].decode()
    assert f'vllm:time_seconds_bucket{{le="2.0",model_name="m"}} 3.0 # {{trace_id="{TRACE}"}} 1.5 ' in page
    assert page.count(" # {") == 1
    assert page.endswith("# EOF\n")
    page = metrics_page(registry, "text/plain")[0].decode()
    assert 'vllm:time_seconds_bucket{le="2.0",model_name="m"} 3.0\n' in page
    assert TRACE not in page
