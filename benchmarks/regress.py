"""Runs ``bench regress``: two checkouts of Tokenloom in turns on the workloads of ``bench peers`` and through a server.

In a round both trees take their turns one right after the other, so what slows the machine slows both. What counts is
the median over the rounds of the ratio of the two.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenloom.supervisor.ports import reserved_ports

from .load.arrivals import LoadResult, Pace
from .load.datasets import DatasetOptions
from .mesh.contenders import Contender, compare, serve_command
from .mesh.serve import ServeOptions
from .mesh.serve_report import summarize
from .peers.compare import Peer, PeerOptions, run_rounds, vocab_size
from .peers.workloads import WORKLOADS
from .report import machine

BASE, OURS = "base", "ours"
SERVER = "server"
_OFFLINE = {
    "single-stream": ("decode_tokens_per_second", "ttft_ms"),
    "long-prompt": ("ttft_ms",),
    "batch": ("output_tokens_per_second",),
    "shared-prefix": ("requests_per_second",),
}
_SERVED = ("output_throughput", "median_ttft_ms", "median_itl_ms")
CASES = (*_OFFLINE, SERVER)
"""The names of what can be compared."""


@dataclass(frozen=True)
class RegressOptions:
    """Describes one comparison of two trees."""

    model: Path
    base: Path
    ours: Path
    cases: tuple[str, ...] = CASES
    rounds: int = 5
    threads: int = 0
    """0: one for each core."""
    streams: int = 32
    """Concurrent requests to the servers; each round sends twice as many."""


def run_regress(options: RegressOptions, on_run: Callable[[str, str], None]) -> dict[str, Any]:
    """Compare the trees. ``on_run`` is called before each run of a case.

    Raises ``PeerFailed`` or ``ServerBroke`` if a tree does not run.
    """
    rows = _offline(options, on_run)
    if SERVER in options.cases:
        rows += _served(options, on_run)
    return {
        "machine": machine.describe(),
        "model": options.model.name,
        "rounds": options.rounds,
        "figures": rows,
    }


def table(report: dict[str, Any]) -> Table:
    """Show each figure of both trees and their ratio; above 1 our tree is better."""
    shown = Table(title=f"ours / base, {report['model']}", title_justify="left", title_style="bold")
    for column in ("case", "figure", BASE, OURS, "ratio"):
        shown.add_column(column, justify="left" if column in ("case", "figure") else "right")
    for row in report["figures"]:
        values = (f"{row[BASE]:,.2f}", f"{row[OURS]:,.2f}", f"{row['ratio']:.3f}")
        shown.add_row(row["case"], row["figure"].replace("_", " "), *values)
    return shown


def regressions(report: dict[str, Any], limit: float) -> list[str]:
    """Name the figures that are worse by more than ``limit``, a share of the base."""
    return [f"{row['case']} {row['figure']}" for row in report["figures"] if row["ratio"] < 1 / (1 + limit)]


def _offline(options: RegressOptions, on_run: Callable[[str, str], None]) -> list[dict[str, Any]]:
    cases = tuple(case for case in options.cases if case in WORKLOADS)
    peer_options = PeerOptions(
        options.model,
        {BASE: sys.executable, OURS: sys.executable},
        cases,
        options.rounds,
        options.threads,
        trees={BASE: options.base, OURS: options.ours},
    )
    rows = []
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name, peer_options)) for name in (BASE, OURS)] if cases else []
        for case in cases:
            measured = run_rounds(peers, WORKLOADS[case], peer_options, on_run)
            rows += [_row(case, figure, measured[BASE], measured[OURS]) for figure in _OFFLINE[case]]
    return rows


def _served(options: RegressOptions, on_run: Callable[[str, str], None]) -> list[dict[str, Any]]:
    serve_options = ServeOptions(
        model=options.model.name,
        vocab_size=vocab_size(options.model),
        dataset=DatasetOptions(num_prompts=2 * options.streams, input_len=128, output_len=128),
        pace=Pace(max_concurrency=options.streams),
        num_warmups=options.streams,
    )

    def on_round(name: str, _: int) -> Callable[[object], None]:
        on_run(SERVER, name)
        return lambda _: None

    trees = {BASE: options.base, OURS: options.ours}
    flags = ("--served-model-name", options.model.name, "--always-queued", str(2 * options.streams))
    with reserved_ports("127.0.0.1", len(trees), 0, 0) as ports:
        contenders = [
            Contender(
                name,
                (
                    *("env", f"PYTHONPATH={tree}"),
                    *serve_command(str(options.model), port.http, "--grpc-port", str(port.grpc), *flags),
                ),
                f"http://127.0.0.1:{port.http}",
            )
            for (name, tree), port in zip(trees.items(), ports, strict=True)
        ]
        results = asyncio.run(compare(contenders, serve_options, options.rounds, on_round))
    measured = {name: [_summary(run, serve_options) for run in runs] for name, runs in results.items()}
    return [_row(SERVER, figure, measured[BASE], measured[OURS]) for figure in _SERVED]


def _summary(result: LoadResult, options: ServeOptions) -> dict[str, float]:
    return summarize(result, options.objectives, options.percents)


def _row(case: str, figure: str, base: Sequence[dict[str, float]], ours: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of a figure and the median ratio, above 1 if our tree is better."""
    pairs = [(before[figure], after[figure]) for before, after in zip(base, ours, strict=True)]
    is_time = figure.endswith("_ms")
    ratios = [before / after if is_time else after / before for before, after in pairs]
    return {
        "case": case,
        "figure": figure,
        BASE: round(statistics.median(before for before, _ in pairs), 3),
        OURS: round(statistics.median(after for _, after in pairs), 3),
        "ratio": round(statistics.median(ratios), 4),
    }
