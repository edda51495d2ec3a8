"""Runs ``bench shared``: what an engine keeps of its throughput next to busy programs, and under a CPU quota."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from ..mesh.observer import hogs
from ..report import machine
from .cpu_quota import cpu_quota


@dataclass(frozen=True)
class SharedOptions:
    """Says which engine is measured, and with what it shares the machine."""

    model: str
    requests: tuple[int, ...] = (1, 32)
    tokens: int = 64
    """Generated tokens of each request."""
    hogs: int = 2
    """Busy loops; 0: this case is not measured."""
    quota: float = 0.0
    """Cores that the engine may use; 0: this case is not measured."""
    seconds: float = 4.0
    """Shortest time of a measurement."""
    turns: int = 3
    llm: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `tokenloom.LLM`."""


class Engine:
    """Controls the process of the measured engine. A context manager."""

    def __init__(self, options: SharedOptions) -> None:
        command = [sys.executable, "-m", "tokenloom.bench.shared_machine.generate"]
        self._stack = ExitStack()
        self._process = self._stack.enter_context(
            subprocess.Popen(
                [*command, options.model, json.dumps(dict(options.llm))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def measure(self, requests: int, tokens: int, seconds: float) -> float:
        """Return the tokens/s of a batch. Raises ``RuntimeError`` if the process ended."""
        assert self._process.stdin is not None
        print(requests, tokens, seconds, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the measured engine ended; its output is above")
        return answer

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._stack.close()


def run_shared(options: SharedOptions) -> dict[str, Any]:
    """Measure every case in turns, so that what slows the machine slows all of them; the rates are medians."""
    rates: dict[tuple[int, str], list[float]] = {}
    with Engine(options) as engine:
        for requests in options.requests:
            engine.measure(requests, options.tokens, 1.0)
        for _ in range(options.turns):
            for name, disturbed in _cases(options, engine):
                with disturbed:
                    for requests in options.requests:
                        engine.measure(requests, options.tokens, 1.0)  # the engine notices what it shares
                        rate = engine.measure(requests, options.tokens, options.seconds)
                        rates.setdefault((requests, name), []).append(rate)
    return {
        "machine": machine.describe(),
        "model": options.model,
        "hogs": options.hogs,
        "quota": options.quota,
        "cases": [_case(requests, rates) for requests in options.requests],
    }


def _cases(options: SharedOptions, engine: Engine) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    yield "quiet", nullcontext()
    if options.hogs:
        yield "hogs", hogs(options.hogs)
    if options.quota:
        yield "quota", cpu_quota(engine.pid, options.quota)


def _case(requests: int, rates: Mapping[tuple[int, str], list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(found) for (count, name), found in rates.items() if count == requests}
    kept = {f"{name}_kept": round(rate / medians["quiet"], 3) for name, rate in medians.items() if name != "quiet"}
    return {"requests": requests, **{name: round(rate, 1) for name, rate in medians.items()}, **kept}


def table(report: dict[str, Any]) -> Table:
    """Return the figures in words: tokens/s, and the share of the quiet machine's."""
    shown = Table(title=f"Shared machine, {report['model']}, tokens/s", title_justify="left", title_style="bold")
    names = [name for name in ("quiet", "hogs", "quota") if name in report["cases"][0]]
    labels = {"quiet": "quiet", "hogs": f"{report['hogs']} busy loops", "quota": f"{report['quota']:g} cores"}
    shown.add_column("requests", justify="right")
    for name in names:
        shown.add_column(labels[name], justify="right")
    for case in report["cases"]:
        shown.add_row(str(case["requests"]), *(_cell(case, name) for name in names))
    return shown


def _cell(case: Mapping[str, Any], name: str) -> str:
    kept = f" ({case[f'{name}_kept']:.0%})" if name != "quiet" else ""
    return f"{case[name]:,.0f}{kept}"
