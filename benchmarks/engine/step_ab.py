"""Measures whether a change makes steps slower: the CPU time of a step without its model, for two trees in turns.

``python -m benchmarks.engine.step_ab --base TREE`` compares against the checkout at TREE (``git worktree add``). Each
pair measures both trees one right after the other and the order alternates, so what slows the machine slows both; what
counts is the median over the pairs of their ratios. It ends with status 1 if that is above the limit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..report.stats import percentile

_HERE = Path(__file__).resolve().parent


class Tree:
    """Measures the steps of a checkout in a process of its own. A context manager."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenloom.bench.engine.step_loop"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(path.resolve()), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        )

    def measure(self, rows: int, sampling: str, steps: int) -> float:
        """Return the CPU µs of a step. Raises ``RuntimeError`` if the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(rows, sampling, steps, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the measuring process ended; its output is above")
        return float(answer)

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._stack.close()


def compare(base: Tree, ours: Tree, rows: int, sampling: str, *, pairs: int, steps: int) -> dict[str, Any]:
    """Return the medians of both, and the median and quartiles of the ratio ours / base over the pairs."""
    for tree in (base, ours):
        tree.measure(rows, sampling, steps)  # the first builds and warms up
    measured = []
    for pair in range(pairs):
        order = (base, ours) if pair % 2 else (ours, base)
        taken = {tree: tree.measure(rows, sampling, steps) for tree in order}
        measured.append((taken[base], taken[ours]))
    ratios = [ours_us / base_us for base_us, ours_us in measured]
    return {
        "rows": rows,
        "sampling": sampling,
        "pairs": pairs,
        "base_us": round(statistics.median(base_us for base_us, _ in measured), 1),
        "ours_us": round(statistics.median(ours_us for _, ours_us in measured), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(percentile(ratios, percent), 4) for percent in (25, 75)],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a JSON line for each case and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--ours", type=Path, default=_HERE.parents[1], help="checkout under test [this one]")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="steps of each measurement [40]")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--sampling", nargs="+", default=["greedy", "top-p"])
    parser.add_argument("--limit", type=float, default=0.02, help="fail above this slowdown [0.02]")
    options = parser.parse_args(arguments)
    is_slower = False
    with Tree(options.base) as base, Tree(options.ours) as ours:
        for rows in options.rows:
            for sampling in options.sampling:
                report = compare(base, ours, rows, sampling, pairs=options.pairs, steps=options.steps)
                print(json.dumps(report), flush=True)
                is_slower |= report["ratio"] > 1 + options.limit
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
