"""Prints and keeps the rows of a section as they come, and times work of the device."""

import json
from collections.abc import Callable
from pathlib import Path

import torch


class Rows:
    """Holds where the rows of one section go."""

    def __init__(self, section: str, results: Path) -> None:
        self._section = section
        self.file = results / "rows.jsonl"

    def add(self, name: str, **values: float | str) -> None:
        """Print a row and append it to the file, so that a section that is stopped keeps what it found."""
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        )
        print(f"{name:<44} {shown}", flush=True)
        with self.file.open("a") as file:
            file.write(json.dumps({"section": self._section, "name": name, **values}) + "\n")


def device_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median milliseconds that the device takes for a call, after three calls to warm up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def graph_ms(run: Callable[[], object], calls: int = 10) -> float:
    """Return the milliseconds of one call, from a graph of ``calls`` calls: without the host's part of a launch."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return device_ms(graph.replay, 10) / calls
