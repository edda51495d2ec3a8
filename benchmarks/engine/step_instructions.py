"""Measures whether a change makes steps slower, on a machine that others use too: it counts instructions, not time.

``python -m benchmarks.engine.step_instructions --base TREE`` runs the loop of :mod:`.step_loop` of both trees under
valgrind, each for two numbers of steps, with kernels for AVX2; the difference is what the steps took, without imports
and set-up. Instructions do not show cache misses, but they repeat within about 0.5 % where the time of :mod:`.step_ab`
varies by 20 %. It ends with status 1 if a ratio is above the limit, and needs ``valgrind``; a case takes minutes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
# valgrind knows no instructions beyond AVX2; kernels compiled for this processor would end with SIGILL on a newer one.
_PROGRAM = """
import platform, runpy
from tokenloom.gpu_worker.kernels.levels import limit_level
if platform.machine() == "x86_64":
    limit_level("x86-64-v3")
runpy.run_module("tokenloom.bench.engine.step_loop", run_name="__main__")
"""
_TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


def count(tree: Path, rows: int, sampling: str, steps: int) -> int:
    """Return the instructions of a process of this tree that runs so many measured steps.

    Raises ``RuntimeError`` without valgrind, or if the process ended early.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree.resolve()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the order of a set is part of what is counted
        "OMP_NUM_THREADS": "1",
    }
    command = (*_VALGRIND, sys.executable, "-P", "-c", _PROGRAM)
    try:
        with tempfile.TemporaryDirectory() as directory:  # a tree in the current directory would be imported
            done = subprocess.run(
                command,
                input=f"{rows} {sampling} {steps}\n",
                capture_output=True,
                text=True,
                env=environment,
                cwd=directory,
                check=True,
            )
    except FileNotFoundError:
        raise RuntimeError("valgrind is not installed") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the measuring process failed:\n{error.stderr}") from None
    return read_total(done.stderr)


def read_total(report: str) -> int:
    """Return the number of instructions in cachegrind's report. Raises ``RuntimeError`` if it has none."""
    found = _TOTAL.search(report)
    if found is None:
        raise RuntimeError(f"valgrind reported no instructions:\n{report}")
    return int(found[1].replace(",", ""))


def per_step(tree: Path, rows: int, sampling: str, few: int, many: int) -> float:
    """Return the instructions of one step: what ``many`` steps take beyond ``few``."""
    return (count(tree, rows, sampling, many) - count(tree, rows, sampling, few)) / (many - few)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a JSON line for each case and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--ours", type=Path, default=_HERE.parents[1], help="checkout under test [this one]")
    # Imports and set-up take 7.13e9 instructions, and two runs of one tree lay 1.8e6 apart. Over 160 steps of 32 greedy
    # rows that is 1.8 % of a step, more than the limit; over 1,280 it is 0.2 %.
    parser.add_argument("--steps", type=int, nargs=2, default=[100, 1380], help="few and many steps [100 1380]")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--sampling", nargs="+", default=["greedy", "top-p"])
    parser.add_argument("--limit", type=float, default=0.005, help="fail above this slowdown [0.005]")
    options = parser.parse_args(arguments)
    is_slower = False
    for rows in options.rows:
        for sampling in options.sampling:
            base, ours = (per_step(tree, rows, sampling, *options.steps) for tree in (options.base, options.ours))
            case = {"rows": rows, "sampling": sampling, "base": round(base), "ours": round(ours)}
            print(json.dumps({**case, "ratio": round(ours / base, 4)}), flush=True)
            is_slower |= ours > base * (1 + options.limit)
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
