"""Runs ``bench regress``: two checkouts of Tokenloom in turns on the workloads of ``bench peers`` and through a server.

In a round both trees start afresh and take short turns, A B B A, so that what slows the machine slows both, and each
runs as often first as second. A round gives one ratio of each figure, and rounds follow until the interval of these
lies on one side of the limit. The trees start afresh because where a process's memory happens to lie makes several
percent for as long as it lives, which no number of turns of the same two processes would show.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace
from rich.table import Table

from tokenloom.supervisor.ports import reserved_ports

from .load.arrivals import LoadResult, Pace
from .load.datasets import DatasetOptions
from .mesh.contenders import Contender, load, running, serve_command
from .mesh.serve import ServeOptions, prompts_for
from .mesh.serve_report import summarize
from .peers.compare import Peer, PeerOptions, vocab_size
from .peers.workloads import WORKLOADS, Workload
from .report import machine
from .report.paired import FEWEST, Interval, Verdict, paired

BASE, OURS = "base", "ours"
SERVER = "server"
_FIGURES = {
    "single-stream": ("decode_tokens_per_second", "ttft_ms"),
    "long-prompt": ("ttft_ms",),
    "batch": ("output_tokens_per_second",),
    "shared-prefix": ("requests_per_second",),
    SERVER: ("output_throughput", "median_ttft_ms", "median_itl_ms"),
}
CASES = tuple(_FIGURES)
"""The names of what can be compared."""
_CASE_SECONDS = 8.0
"""For so long a round repeats the four turns of an offline case: the machine's speed changes within seconds."""
_TURN_SECONDS = 0.25
"""An offline turn repeats its workload for so long. If it repeats it at all, the first time does not count: right after
the other tree's turn the processor's caches hold none of its code and weights, and a tiny model's first token takes up
to 40 % longer."""

Turns: TypeAlias = Mapping[str, Sequence[Mapping[str, float]]]
"""The figures of each turn of a round, by tree: of each A B B A two."""
Measure: TypeAlias = Callable[[int, Sequence[str]], Mapping[str, Turns]]
"""Measures a round, given its number and the cases to run, and returns the turns of each case."""
OnRun: TypeAlias = Callable[[str, str], None]
"""Called before each turn with the case and the tree."""


@dataclass(frozen=True)
class RegressOptions:
    """Describes one comparison of two trees."""

    model: Path
    base: Path
    ours: Path
    cases: tuple[str, ...] = CASES
    rounds: int = FEWEST
    """Of each case, at least."""
    most_rounds: int = 20
    """Of a case that is not decided earlier."""
    limit: float = 0.03
    """The share of a figure that our tree may lose."""
    threads: int = 0
    """0: one for each core."""
    streams: int = 32
    """Concurrent requests to the servers; each turn sends twice as many."""

    @property
    def trees(self) -> dict[str, Path]:
        return {BASE: self.base, OURS: self.ours}


@dataclass(slots=True)
class _Figure:
    """Collects one figure of all rounds; ratios above 1 say that our tree is better."""

    case: str
    name: str
    limit: float
    values: dict[str, list[float]] = field(default_factory=lambda: {BASE: [], OURS: []})
    ratios: list[float] = field(default_factory=list)

    def take(self, turns: Turns) -> None:
        """Take a round."""
        base, ours = ([turn[self.name] for turn in turns[tree]] for tree in (BASE, OURS))
        self.values[BASE] += base
        self.values[OURS] += ours
        pair = (ours, base) if self.name.endswith("_ms") else (base, ours)
        fours = range(0, len(base), 2)
        self.ratios.append(statistics.median(paired(*(each[at : at + 2] for each in pair)) for at in fours))

    @property
    def is_decided(self) -> bool:
        return Interval.of(self.ratios).verdict(self.limit) is not Verdict.UNDECIDED

    def row(self) -> dict[str, Any]:
        """Return what is shown of the figure."""
        interval = Interval.of(self.ratios)
        return {
            "case": self.case,
            "figure": self.name,
            **{tree: round(statistics.median(values), 3) for tree, values in self.values.items()},
            "ratio": round(interval.median, 4),
            "low": round(interval.low, 4),
            "high": round(interval.high, 4),
            "rounds": len(self.ratios),
            "verdict": interval.verdict(self.limit),
        }


def run_regress(options: RegressOptions, on_run: OnRun) -> dict[str, Any]:
    """Compare the trees. Raises ``PeerFailed`` or ``ServerBroke`` if a tree does not run."""

    def measure(number: int, cases: Sequence[str]) -> Mapping[str, Turns]:
        turns = _offline(options, number, [case for case in cases if case in WORKLOADS], on_run)
        if SERVER in cases:
            turns[SERVER] = asyncio.run(_served(options, number, on_run))
        return turns

    return {
        "machine": machine.describe(),
        "model": options.model.name,
        "limit": options.limit,
        "figures": decide(options, measure),
    }


def decide(options: RegressOptions, measure: Measure) -> list[dict[str, Any]]:
    """Measure rounds until every figure is decided or has had its most rounds, and return a row for each."""
    figures = [_Figure(case, name, options.limit) for case in options.cases for name in _FIGURES[case]]
    for number in range(options.most_rounds):
        is_early = number < options.rounds
        cases = [name for name in options.cases if is_early or not _is_decided(figures, name)]
        if not cases:
            break
        measured = measure(number, cases)
        for figure in figures:
            if figure.case in measured:
                figure.take(measured[figure.case])
    return [figure.row() for figure in figures]


def _is_decided(figures: Sequence[_Figure], case: str) -> bool:
    return all(figure.is_decided for figure in figures if figure.case == case)


def table(report: dict[str, Any]) -> Table:
    """Show each figure of both trees and their ratio; above 1 our tree is better."""
    shown = Table(title=f"ours / base, {report['model']}", title_justify="left", title_style="bold")
    for column in ("case", "figure", BASE, OURS, "ratio", "interval", "rounds", ""):
        shown.add_column(column, justify="left" if column in ("case", "figure", "") else "right")
    for row in report["figures"]:
        values = (
            f"{row[BASE]:,.2f}",
            f"{row[OURS]:,.2f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
        )
        shown.add_row(row["case"], row["figure"].replace("_", " "), *values, str(row["rounds"]), row["verdict"])
    return shown


def named(report: dict[str, Any], verdict: Verdict) -> list[str]:
    """Name the figures with a verdict."""
    return [f"{row['case']} {row['figure']}" for row in report["figures"] if row["verdict"] == verdict]


def _starts(number: int) -> tuple[str, str]:
    """Return the trees in the order in which a round starts them."""
    return (BASE, OURS) if number // 2 % 2 == 0 else (OURS, BASE)


def _turns(number: int) -> tuple[str, ...]:
    """Return whose turns four are. In four rounds, each tree that starts first has the first turn as often as not."""
    one, other = (BASE, OURS) if number % 2 == 0 else (OURS, BASE)
    return (one, other, other, one)


def _offline(options: RegressOptions, number: int, cases: Sequence[str], on_run: OnRun) -> dict[str, Turns]:
    """Measure the workloads of a round, each after an untimed run."""
    if not cases:
        return {}
    python = dict.fromkeys(options.trees, sys.executable)
    peer_options = PeerOptions(options.model, python, tuple(cases), threads=options.threads, trees=options.trees)
    measured: dict[str, Turns] = {}
    with ExitStack() as stack:
        peers = {name: Peer(name, peer_options) for name in _starts(number)}  # they load side by side
        for peer in peers.values():
            stack.callback(peer.close)
        for peer in peers.values():
            stack.enter_context(peer)
        for case in cases:
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
            seeds = count()  # of prompts: none comes twice
            for peer in peers.values():
                peer.run(WORKLOADS[case], next(seeds))
            measured[case] = turns
            ends_at = time.monotonic() + _CASE_SECONDS
            while not turns[BASE] or time.monotonic() < ends_at:
                for name in _turns(number):
                    on_run(case, name)
                    turns[name].append(_turn(peers[name], WORKLOADS[case], seeds))
    return measured


def _turn(peer: Peer, workload: Workload, seeds: Iterator[int]) -> dict[str, float]:
    """Return the medians of the figures of one turn."""
    ends_at = time.monotonic() + _TURN_SECONDS
    runs = [peer.run(workload, next(seeds))]
    while time.monotonic() < ends_at:
        runs.append(peer.run(workload, next(seeds)))
    counted = runs[1:] or runs
    return {figure: statistics.median(run[figure] for run in counted) for figure in counted[0]}


async def _served(options: RegressOptions, number: int, on_run: OnRun) -> Turns:
    """Measure the servers of a round, each after an untimed turn. Both get the same prompts, and none twice."""
    serve_options = ServeOptions(
        model=options.model.name,
        vocab_size=vocab_size(options.model),
        dataset=DatasetOptions(num_prompts=2 * options.streams, input_len=128, output_len=128),
        pace=Pace(max_concurrency=options.streams),
        num_warmups=options.streams,
    )
    results: dict[str, list[LoadResult]] = {name: [] for name in options.trees}

    async def take_turn(contender: Contender) -> None:
        mine = results[contender.name]
        dataset = replace(serve_options.dataset, seed=3 * number + len(mine))
        prompts = prompts_for(replace(serve_options, dataset=dataset))
        mine.append(await load(contender, serve_options, prompts, lambda _: None))

    async with AsyncExitStack() as stack:
        ports = stack.enter_context(reserved_ports("127.0.0.1", len(results), 0, 0))
        pairs = zip(results, ports, strict=True)
        contenders = {name: _contender(options, name, port.http, port.grpc) for name, port in pairs}
        for name in _starts(number):
            await stack.enter_async_context(running(contenders[name]))
        for name in _turns(number)[:2]:
            await take_turn(contenders[name])
        for name in _turns(number):
            on_run(SERVER, name)
            await take_turn(contenders[name])
    objectives, percents = serve_options.objectives, serve_options.percents
    return {name: [summarize(run, objectives, percents) for run in runs[1:]] for name, runs in results.items()}


def _contender(options: RegressOptions, name: str, http: int, grpc: int) -> Contender:
    flags = ("--served-model-name", options.model.name, "--always-queued", str(2 * options.streams))
    command = serve_command(str(options.model), http, "--grpc-port", str(grpc), *flags)
    return Contender(name, ("env", f"PYTHONPATH={options.trees[name]}", *command), f"http://127.0.0.1:{http}")
