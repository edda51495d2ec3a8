"""Runs ``bench disaggregated``: colocated engines against prefill and decode engines, under one mixed load, in
turns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from ..load.arrivals import LoadResult
from ..report import machine
from ..report.plot import Panel, write_cdfs
from .serve import ServeOptions
from .serve_report import LATENCIES, latencies_ms, summarize


def report(results: dict[str, list[LoadResult]], options: ServeOptions) -> dict[str, Any]:
    """Report all rounds of each contender together."""
    merged = {
        name: LoadResult([o for run in runs for o in run.outcomes], sum(run.seconds for run in runs))
        for name, runs in results.items()
    }
    return {
        "machine": machine.describe(),
        "model": options.model,
        "dataset": msgspec.structs.asdict(options.dataset),
        "request_rate": str(options.pace.request_rate),
        "max_concurrency": options.pace.max_concurrency,
        "goodput": options.objectives.bounds,
        "rounds": len(next(iter(results.values()))),
        "contenders": {
            name: summarize(result, options.objectives, options.percents) for name, result in merged.items()
        },
    }


def table(report: dict[str, Any]) -> Table:
    """Show the contenders in columns: all requests first, then each kind."""
    contenders: dict[str, dict[str, Any]] = report["contenders"]
    shown = Table(title="Side by side", title_justify="left", title_style="bold")
    shown.add_column("")
    for name in contenders:
        shown.add_column(name, justify="right")
    for key, text in (("output_throughput", "output tokens/s"), ("request_goodput", "goodput, requests/s")):
        _add(shown, text, [part.get(key) for part in contenders.values()])
    kinds = ["", *next(iter(contenders.values())).get("kinds", {})]
    for kind in kinds:
        shown.add_section()
        parts = [part["kinds"][kind] if kind else part for part in contenders.values()]
        if kind:
            _add(shown, f"{kind} goodput, requests/s", [part.get("request_goodput") for part in parts])
        for name, text in LATENCIES.items():
            for column in ("median", "p99"):
                _add(shown, f"{kind} {text}, {column}, ms".strip(), [part.get(f"{column}_{name}") for part in parts])
    return shown


def write_plot(path: Path, results: dict[str, list[LoadResult]]) -> None:
    """Draw cumulative distributions with a colour for each contender."""
    values = {name: latencies_ms(o for run in runs for o in run.outcomes) for name, runs in results.items()}
    write_cdfs(path, [Panel(text, "ms", {c: v[name] for c, v in values.items()}) for name, text in LATENCIES.items()])


def _add(table: Table, text: str, values: Sequence[float | None]) -> None:
    table.add_row(text, *("-" if value is None else f"{value:,.2f}" for value in values))
