"""Reads what PyTorch's profiler recorded of steps: the longest kernels, and how long the GPU had nothing to do."""

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import Target

LARGEST_TRACE = 16 << 20
_KINDS = torch.autograd.DeviceType


def profiled(target: Target, step: Callable[[], object], num_steps: int) -> torch.profiler.profile:
    """Record steps; the first one, which makes the profiler ready, is not recorded."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if target.has_gpu:
        activities = [torch.profiler.ProfilerActivity.CUDA]
    step()
    # Without `acc_events` PyTorch 2.11 warns that it may clear events between cycles, of which there is one here.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(num_steps):
            step()
        target.synchronize()
    return profile


def idle_share(profile: torch.profiler.profile) -> float:
    """Return the share of the time between the first and the last kernel in which none ran; 0 without kernels."""
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == _KINDS.CUDA
    ]
    return idle_between(spans)


def idle_between(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first begin to the last end that no span covers."""
    if not spans:
        return 0.0
    covered, reached = 0.0, min(begin for begin, _ in spans)
    first = reached
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - covered / (reached - first) if reached > first else 0.0


def add_longest(rows: Rows, profile: torch.profiler.profile, count: int = 20) -> None:
    """Add a row for each of the kernels that took longest in all."""
    averages = profile.key_averages()
    times = [(event.self_device_time_total or event.self_cpu_time_total, event) for event in averages]
    for microseconds, event in sorted(times, key=lambda each: -each[0])[:count]:
        rows.add(f"kernel {event.key[:60]}", us_in_all=float(microseconds), calls=event.count)


def keep(rows: Rows, profile: torch.profiler.profile, name: str) -> None:
    """Write the trace, gzipped, unless it is larger than is kept; a row says how large."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        packed = gzip.compress(Path(file.name).read_bytes())
    kept = len(packed) <= LARGEST_TRACE
    if kept:
        (rows.folder / name).write_bytes(packed)
    rows.add(f"trace {name}", megabytes=len(packed) / 1e6, kept=str(kept))
