"""Runs ``bench peers``: engines in turns in one run, each in an environment of its own."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..report import machine
from ..report.bar_plot import Bar, write_bars
from ..report.stats import spread
from .workloads import DEFAULT_WORKLOADS, WORKLOADS, Workload

ADAPTERS = {
    "tokenloom": "tokenloom.Tokenloom",
    "transformers": "transformers.Transformers",
    "vllm": "vllm.VLLM",
    "openvino": "openvino.OpenVINO",
    "llamacpp": "llamacpp.LlamaCpp",
}
"""Maps an engine to its module.Class."""
_LORA_ENGINES = frozenset({"tokenloom", "vllm"})
"""Engines whose adapter computes requests with LoRA adapters."""
# Appended to the path, never before the standard library; `peers` is then a package of its own.
_LAUNCH = "import sys; sys.path.append(sys.argv.pop(1)); from peers.worker import main; main(sys.argv[1:])"
_STOP_SECONDS = 20.0


class PeerFailed(Exception):
    """Raised when an engine ends; the message ends with its last output."""


@dataclass(frozen=True)
class PeerOptions:
    """Describes one comparison."""

    model: Path
    pythons: Mapping[str, str]
    """Maps an engine to the interpreter that has it."""
    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    repeats: int = 3
    threads: int = 0
    """0: one for each core."""
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Maps an engine to its adapter's options."""
    seed: int = 0
    trees: Mapping[str, Path] = field(default_factory=dict)
    """Maps other names of ``pythons`` to the checkout of Tokenloom that each runs."""


class Peer:
    """Runs an engine in its process. Use it as ``with``."""

    def __init__(self, name: str, options: PeerOptions) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        threads = options.threads or os.cpu_count() or 1
        setup = {
            "model": str(options.model),
            "threads": threads,
            "workloads": options.workloads,
            "options": dict(options.options.get(_engine(name, options), {})),
            "vocab_size": vocab_size(options.model),
        }
        self._process = subprocess.Popen(
            [
                *("env", *_environment(name, threads, options)),
                *(options.pythons[name], "-P", "-c", _LAUNCH),
                *(str(Path(__file__).parent.parent), ADAPTERS[_engine(name, options)], json.dumps(setup)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.version = ""

    def __enter__(self) -> "Peer":
        try:
            self.version = str(self._read()["version"])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process: terminate first, then kill. Idempotent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_STOP_SECONDS)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def run(self, workload: Workload, seed: int) -> dict[str, float]:
        """Return one repeat's figures. Raises `PeerFailed`."""
        assert self._process.stdin is not None
        load = machine.Load()
        try:
            print(json.dumps({"workload": workload.name, "seed": seed}), file=self._process.stdin, flush=True)
        except OSError:
            raise self._failure() from None
        timing = self._read()
        figures = {
            "output_tokens_per_second": timing["output_tokens"] / timing["seconds"],
            "requests_per_second": workload.requests / timing["seconds"],
            **load.cores(),
        }
        if timing["ttft"] is not None:
            figures["ttft_ms"] = timing["ttft"] * 1e3
            figures["decode_tokens_per_second"] = (workload.output - 1) / timing["decode_seconds"]
        return figures

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> PeerFailed:
        self._process.wait()
        self._log.seek(0)
        text = self._log.read()[-2000:].decode(errors="replace")
        return PeerFailed(f"{self.name} ended with status {self._process.returncode}\n{text}")


def _engine(name: str, options: PeerOptions) -> str:
    return "tokenloom" if name in options.trees else name


def _environment(name: str, threads: int, options: PeerOptions) -> list[str]:
    """Return the environment that an engine reads before it is imported, as arguments of ``env``."""
    chosen = options.options.get(name, {})
    settings = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name in options.trees:
        settings["PYTHONPATH"] = str(options.trees[name])
    if name != "vllm":
        settings["OMP_NUM_THREADS"] = str(threads)
    else:
        settings |= {
            # vLLM's default leaves one core to the engine's process and computes on the others.
            "VLLM_CPU_OMP_THREADS_BIND": chosen.get("bind", f"0-{threads - 1}"),
            "VLLM_CPU_KVCACHE_SPACE": chosen.get("kv_gib", "2"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if "preload" in chosen:
            settings["LD_PRELOAD"] = chosen["preload"]
    return [f"{key}={value}" for key, value in settings.items()]


def vocab_size(model: Path) -> int:
    """Return the number of token ids of the checkpoint."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def run_peers(options: PeerOptions, on_run: Callable[[str, str], None]) -> dict[str, Any]:
    """Load all engines, then run each workload: one untimed round, then `repeats` rounds in which all take a turn.

    ``on_run`` is called before each run. An engine that fails ends the comparison; leave it out of the next one.
    Raises ``ValueError`` for an engine that cannot run one of the workloads.
    """
    _check_lora(options)
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name, options)) for name in options.pythons]
        results = {name: _rounds(peers, WORKLOADS[name], options, on_run) for name in options.workloads}
        versions = {peer.name: peer.version for peer in peers}
    return {
        "machine": machine.describe(),
        "model": options.model.name,
        "versions": versions,
        "repeats": options.repeats,
        "workloads": results,
    }


def _check_lora(options: PeerOptions) -> None:
    names = [name for name in options.workloads if WORKLOADS[name].adapters]
    unable = sorted({_engine(name, options) for name in options.pythons} - _LORA_ENGINES)
    if names and unable:
        able = " and ".join(sorted(_LORA_ENGINES))
        raise ValueError(f"workload {names[0]} runs on {able} only; leave out {', '.join(unable)}")


def _rounds(
    peers: Sequence[Peer], workload: Workload, options: PeerOptions, on_run: Callable[[str, str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    rows = run_rounds(peers, workload, options, on_run)
    return {
        name: {figure: spread([row[figure] for row in repeats]) for figure in repeats[0]}
        for name, repeats in rows.items()
    }


def run_rounds(
    peers: Sequence[Peer], workload: Workload, options: PeerOptions, on_run: Callable[[str, str], None]
) -> dict[str, list[dict[str, float]]]:
    """Return the figures of every engine's timed rounds, after an untimed one; the order of the engines rotates."""
    rows: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    for index in range(-1, options.repeats):
        for offset in range(len(peers)):
            peer = peers[(index + offset) % len(peers)]
            on_run(workload.name, peer.name)
            figures = peer.run(workload, options.seed + 1 + index)
            if index >= 0:
                rows[peer.name].append(figures)
    return rows


def num_runs(options: PeerOptions) -> int:
    """How often `run_peers` calls ``on_run``."""
    return len(options.workloads) * len(options.pythons) * (options.repeats + 1)


def write_plot(path: Path, report: dict[str, Any]) -> None:
    """Draw the output tokens a second of every engine, by workload."""
    figure = "output_tokens_per_second"
    groups = {
        f"{name}, output tokens/s": [
            Bar(engine, row[figure]["median"], row[figure]["min"], row[figure]["max"]) for engine, row in rows.items()
        ]
        for name, rows in report["workloads"].items()
    }
    write_bars(path, groups, report["model"])


def tables(report: dict[str, Any]) -> list[Table]:
    """Make a table for each workload: median (least - most)."""
    shown = []
    for name, rows in report["workloads"].items():
        table = Table(title=f"{name}, {report['model']}", title_justify="left", title_style="bold")
        figures = list(next(iter(rows.values())))
        for column in ("", *(figure.replace("_", " ").replace(" per second", "/s") for figure in figures)):
            table.add_column(column, justify="right" if column else "left")
        for engine, row in rows.items():
            cells = (f"{row[f]['median']:,.2f} ({row[f]['min']:,.2f}-{row[f]['max']:,.2f})" for f in figures)
            table.add_row(engine, *cells)
        shown.append(table)
    return shown
