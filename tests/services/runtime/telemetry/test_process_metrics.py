"""Metrics of this process and of others."""

import os

import pytest
from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry import process_metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return process_metrics.new_registry()


def test_another_process_is_shown_while_there_is_one(registry: CollectorRegistry) -> None:
    pid: int | None = None
    process_metrics.observe_process(registry, "tokenloom_engine_core", lambda: pid)
    name = "tokenloom_engine_core_process_cpu_seconds_total"
    assert registry.get_sample_value(name) is None
    pid = os.getpid()
    seconds = registry.get_sample_value(name)
    assert seconds is not None
    assert seconds > 0
