"""Measures what the start of each service takes of a processor, against another checkout.

``python -m tools.start_cpu --base TREE`` starts ``python -m tokenloom.services.SERVICE --help`` of both trees in turns,
A B B A: the imports of a service and its table of options, which is what a start pays for code that it does not use. It
prints the medians of the processor seconds of all rounds, and ends with status 1 if a service takes more than the limit
beyond the base. A first start of each writes the bytecode, and does not count. The machine should be idle.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

SERVICES = ("gateway", "tokenizer", "output_processor", "coordinator", "engine")
_ROOT = Path(__file__).resolve().parents[1]

Measure = Callable[[Path, str], float]


def processor_seconds(tree: Path, service: str, bytecode: Path) -> float:
    """Return the processor seconds of one start. ``bytecode``: a directory that takes the place of ``__pycache__``.
    Raises ``RuntimeError`` if it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree.resolve()),
        "PYTHONHASHSEED": "0",
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "PYTHONDONTWRITEBYTECODE": "",  # a shell that sets it would have every start compile all that it imports
    }
    command = [sys.executable, "-P", "-m", f"tokenloom.services.{service}", "--help"]
    with tempfile.TemporaryDirectory() as directory:  # a tree in the current directory would be imported
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{service} of {tree} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def compare(trees: tuple[Path, Path], service: str, rounds: int, measure: Measure) -> tuple[float, float]:
    """Return the median seconds of both trees. What slows the machine for a while slows both."""
    found: tuple[list[float], list[float]] = ([], [])
    for tree in trees:
        measure(tree, service)
    for _ in range(rounds):
        for turn in (0, 1, 1, 0):
            found[turn].append(measure(trees[turn], service))
    return median(found[0]), median(found[1])


def main(arguments: Sequence[str] | None = None, measure: Measure | None = None) -> int:
    """Print a line for each service and return the exit status."""
    if measure is None:
        with tempfile.TemporaryDirectory() as bytecode:
            return main(arguments, partial(processor_seconds, bytecode=Path(bytecode)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--ours", type=Path, default=_ROOT, help="checkout under test [this one]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of four starts [%(default)s]")
    parser.add_argument("--limit", type=float, default=20.0, help="milliseconds beyond the base [%(default)s]")
    parser.add_argument("services", nargs="*", default=SERVICES, help="services to start [all but encoders]")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    is_slow = False
    for service in options.services:
        base, ours = compare((options.base, options.ours), service, options.rounds, measure)
        more = 1000 * (ours - base)
        is_slow = is_slow or not more <= options.limit  # no number is no limit that holds
        sys.stdout.write(f"{service}: {1000 * base:.0f} ms, {1000 * ours:.0f} ms: {more:+.1f} ms of CPU\n")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
