"""CPU time per output token."""

import os
import time

import pytest
from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry.process_metrics import cpu_seconds_of, show_token_cost

NAME = "tokenloom_cpu_seconds_per_output_token"


def test_what_came_before_does_not_count() -> None:
    registry, seconds, tokens = CollectorRegistry(), [5.0], [0]
    show_token_cost(registry, lambda: tokens[0], cpu_seconds=lambda: seconds[0])
    assert registry.get_sample_value(NAME) == 0.0, "no token yet"
    seconds[0], tokens[0] = 5.5, 1000
    assert registry.get_sample_value(NAME) == pytest.approx(0.0005)


def test_another_process_that_is_gone_costs_nothing() -> None:
    registry, seconds = CollectorRegistry(), [5.0]
    show_token_cost(registry, lambda: 10, prefix="core", cpu_seconds=lambda: seconds[0])
    seconds[0] = 0.0
    assert registry.get_sample_value("core_cpu_seconds_per_output_token") == 0.0


def test_cpu_time_of_a_process() -> None:
    while time.process_time() < 0.05:
        pass
    assert cpu_seconds_of(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)
    assert cpu_seconds_of(None) == 0.0
