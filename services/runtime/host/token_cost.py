"""What a token costs: CPU time of a process over the output tokens that passed through it, as a gauge on /metrics."""

import os
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # columns of /proc/PID/stat behind the command's closing parenthesis


def show_token_cost(
    registry: CollectorRegistry,
    num_tokens: Callable[[], float],
    *,
    prefix: str = "tokenloom",
    cpu_seconds: Callable[[], float] = time.process_time,
) -> None:
    """Adds ``prefix_cpu_seconds_per_output_token``: CPU time since now, of this process unless ``cpu_seconds`` tells
    another's, over ``num_tokens()``; 0 before the first token. For a shorter stretch of time, divide the rates of
    ``process_cpu_seconds_total`` and of the service's tokens."""
    started = cpu_seconds()

    def cost() -> float:
        tokens = num_tokens()
        return max(cpu_seconds() - started, 0.0) / tokens if tokens else 0.0

    text = "CPU time since the service is ready, over the output tokens that passed through it."
    Gauge(f"{prefix}_cpu_seconds_per_output_token", text, registry=registry).set_function(cost)


def cpu_seconds_of(pid: int | None) -> float:
    """CPU time of a process, all its threads, in seconds; 0 when there is none, or where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            columns = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(columns[_UTIME]) + int(columns[_STIME])) / _TICKS_PER_SECOND
