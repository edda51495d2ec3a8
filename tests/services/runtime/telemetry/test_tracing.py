"""Spans reach a collector, and a collector that does not answer delays nothing."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from tests.collector import Collector
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.telemetry.tracing import MAX_HEADER_CHARS, Tracer, pick_headers

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_spans_carry_names_times_and_parents() -> None:
    with Collector() as collector:
        tracer = Tracer(collector.endpoint, "output_processor", "output_processor-0")
        span = tracer.start("process", {"traceparent": PARENT}, attributes={"a": 1})
        assert span is not None
        now = time.monotonic_ns()
        span.child("detokenize", now - 5_000_000, now)
        span.end({"b": ["x"]}, error="it broke")
        tracer.close()
    process, child = collector.named("process"), collector.named("detokenize")
    assert process.trace_id.hex() == child.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert process.parent_span_id.hex() == "b7ad6b7169203331"
    assert child.parent_span_id == process.span_id
    assert child.end_time_unix_nano - child.start_time_unix_nano == 5_000_000
    assert abs(child.end_time_unix_nano - time.time_ns()) < 60e9
    assert process.status.message == "it broke"
    assert {attribute.key for attribute in process.attributes} == {"a", "b"}
    assert collector.services == {"tokenloom-output-processor"}


def test_a_trace_that_is_not_sampled_makes_no_span() -> None:
    with Collector() as collector:
        tracer = Tracer(collector.endpoint, "engine", "engine-0")
        assert tracer.start("engine", {"traceparent": PARENT[:-1] + "0"}) is None
        tracer.close()
    assert collector.spans == []


def test_an_unreachable_collector_delays_nothing() -> None:
    others, started = {*threading.enumerate()}, time.monotonic()
    tracer = Tracer("http://127.0.0.1:9", "engine", "engine-0")
    for _ in range(10_000):  # more than the queue holds
        span = tracer.start("engine", {})
        assert span is not None
        span.end()
    sending = {*threading.enumerate()} - others
    assert sending
    tracer.close()
    for thread in sending:
        thread.join(60)
    assert not any(thread.is_alive() for thread in sending)
    assert time.monotonic() - started < 60


def test_headers_that_may_travel() -> None:
    assert pick_headers([("traceparent", PARENT), ("tracestate", "a=1"), ("authorization", "secret")]) == {
        "traceparent": PARENT,
        "tracestate": "a=1",
    }
    assert pick_headers([("tracestate", "a=1")]) == {}
    assert pick_headers([("traceparent", PARENT), ("tracestate", "x" * (MAX_HEADER_CHARS + 1))]) == {
        "traceparent": PARENT
    }


def test_an_endpoint_is_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ServiceSettings.load(["--otlp-endpoint", "collector:4317"])
    assert "must begin with http" in capsys.readouterr().err


async def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    services = ("gateway", "tokenizer", "output_processor", "coordinator", "engine")
    imports = "; ".join(f"import tokenloom.services.{service}.service" for service in services)
    code = f"import sys; {imports}; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    ran = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=False, timeout=60)
    assert ran.returncode == 0
