"""What was generated with each key, in a bounded number of series."""

from prometheus_client import CollectorRegistry, generate_latest

from tokenloom.services.gateway.metrics.usage_counts import MAX_KEYS, KeyUsage, Used
from tokenloom.services.gateway.tenants.tenant import Tenant

USAGE = Used(requests=1, prompt_tokens=5, cached_tokens=2, output_tokens=3)


def test_the_number_of_series_is_bounded() -> None:
    registry = CollectorRegistry()
    usage = KeyUsage(registry)
    for number in range(MAX_KEYS + 4):
        usage.add(Tenant(name="a", cache_salt=b"", key=f"{number:016x}"), USAGE)
    page = generate_latest(registry).decode()
    assert page.count("tokenloom_key_requests_total{") == MAX_KEYS + 1
    assert 'tokenloom_key_requests_total{key="other",tenant=""} 4.0' in page
    assert 'tokenloom_key_prompt_tokens_total{key="other",tenant=""} 20.0' in page
    assert 'tokenloom_key_output_tokens_total{key="0000000000000000",tenant="a"} 3.0' in page
    assert 'tokenloom_key_cached_tokens_total{key="0000000000000000",tenant="a"} 2.0' in page
