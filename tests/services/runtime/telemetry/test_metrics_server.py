"""/metrics over HTTP, for scrapers and for clients that only hold connections or send nonsense."""

import asyncio
import contextlib
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from tokenloom.services.runtime import addresses
from tokenloom.services.runtime.telemetry import metrics_server, process_metrics
from tokenloom.services.runtime.telemetry.metrics_server import MAX_CONNECTIONS, MetricsServer


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


def exchange(server: MetricsServer, sent: bytes) -> bytes:
    """Return all that the server sends until it closes the connection."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(sent)
        received = b""
        while data := client.recv(65536):
            received += data
    return received


@pytest.fixture
def registry() -> CollectorRegistry:
    return process_metrics.new_registry()


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = MetricsServer(registry, addresses.parse("127.0.0.1:0"))
    yield server
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_serves_process_and_own_metrics(registry: CollectorRegistry, host: str) -> None:
    process_metrics.gauge(registry, "num_requests_running", "Requests in the batch.", ["model_name"]).labels("m").set(3)
    process_metrics.counter(registry, "prompt_tokens", "Tokens.").inc(2)
    process_metrics.histogram(
        registry, "e2e_request_latency_seconds", "Time.", {}, process_metrics.REQUEST_SECONDS
    ).observe(0.4)
    server = MetricsServer(registry, addresses.parse(f"{host}:0"))
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


async def test_prometheus_gets_the_same_names_as_other_clients(registry: CollectorRegistry) -> None:
    process_metrics.counter(registry, "prompt_tokens", "Tokens.").inc(2)
    server = MetricsServer(registry, addresses.parse("127.0.0.1:0"))
    try:
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        text = await asyncio.to_thread(get, f"http://{server.address}/metrics", Accept=accept)
    finally:
        server.close()
    assert "\nvllm:prompt_tokens_total 2.0\n" in text
    assert text.endswith("# EOF\n")


def test_scrapers_choose_format_and_metrics(registry: CollectorRegistry, server: MetricsServer) -> None:
    process_metrics.gauge(registry, "num_requests_running", "Requests in the batch.").set(3)
    url = f"http://{server.address}/metrics?name[]=vllm:num_requests_running"
    text = get(url, Accept="application/openmetrics-text")
    assert "num_requests_running 3.0" in text
    assert "process_cpu" not in text
    assert text.endswith("# EOF\n")


def test_silent_connections_cost_no_thread_and_no_scrape(server: MetricsServer) -> None:
    host, _, port = server.address.rpartition(":")
    with ExitStack() as held:
        threads = threading.active_count()
        for _ in range(3 * MAX_CONNECTIONS):
            held.enter_context(socket.create_connection((host, int(port)), timeout=30))
        assert "process_open_fds" in get(f"http://{server.address}/metrics")
        assert threading.active_count() == threads
        assert len(server._open) <= MAX_CONNECTIONS


def test_a_silent_connection_is_closed(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.1)
    server = MetricsServer(registry, addresses.parse("127.0.0.1:0"))
    try:
        for beginning in (b"", b"GET /metrics HT"):
            with contextlib.suppress(ConnectionResetError):
                assert exchange(server, beginning) == b"", "nothing was asked for"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", b"404"),
    ],
)
def test_nonsense_is_refused_without_a_log_line(
    server: MetricsServer, caplog: pytest.LogCaptureFixture, sent: bytes, status: bytes
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert exchange(server, sent).split(b" ")[1] == status
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_failing_collector_is_logged_once_a_minute(
    registry: CollectorRegistry, server: MetricsServer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> float:
        raise RuntimeError("collector")

    process_metrics.gauge(registry, "broken", "Fails.").set_function(fail)
    for _ in range(5):
        with pytest.raises((OSError, urllib.error.URLError)):
            get(f"http://{server.address}/metrics")
    assert len([record for record in caplog.records if record.name == metrics_server.__name__]) == 1
