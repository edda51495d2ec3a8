"""``python -m tests.explorer``: runs many seeds of every scenario, and shows the schedules that violated something."""

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from .bugs import BUGS, reintroduced, scenario_of
from .runner import Result, describe, run_seed, size_of
from .scenarios import SCENARIOS

_SHOWN = 2
"""Schedules of one scenario that are printed."""


def main() -> int:
    arguments = _parse()
    logging.disable(logging.CRITICAL)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.bug:
        return _hunt(arguments.bug, seeds)
    started, kinds, violated = time.monotonic(), dict[str, list[int]](), Counter[str]()
    for results in _results(seeds, tuple(arguments.scenarios), arguments.jobs):
        for result in results:
            for violation in result.violations:
                kinds.setdefault(f"{result.scenario}: {violation}", []).append(result.plan.seed)
            violated[result.scenario] += bool(result.violations)
            if result.violations and violated[result.scenario] <= arguments.show:
                print(describe(result), flush=True)
    print(f"{len(seeds)} seeds of {len(arguments.scenarios)} scenarios in {time.monotonic() - started:.1f} s")
    for text, found in sorted(kinds.items()):
        print(f"{len(found):6} times, first with seed {found[0]}: {text}")
    print("violated:", ", ".join(f"{name} by {number}" for name, number in (+violated).items()) or "nothing")
    return 1 if kinds else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)} (all)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in (1)")
    parser.add_argument("--show", type=int, default=_SHOWN, help=f"schedules to print of each scenario ({_SHOWN})")
    parser.add_argument("--bug", choices=BUGS, help="put a fault back, and run until a seed finds it")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.scenarios if name not in SCENARIOS]:
        parser.error(f"{unknown[0]!r} is no scenario; there are {', '.join(SCENARIOS)}")
    arguments.scenarios = arguments.scenarios or list(SCENARIOS)
    return arguments


def _hunt(bug: str, seeds: Sequence[int]) -> int:
    """Run seeds with a bug until one of them finds it."""
    for number, seed in enumerate(seeds, 1):
        with reintroduced(bug):
            (result,) = run_seed(seed, (scenario_of(bug),))
            if result.violations:
                print(describe(result))
                print(f"{bug} was found by seed {seed}, the {number}. one")
                return 0
    print(f"{bug} was not found within {len(seeds)} seeds")
    return 1


def _results(seeds: Sequence[int], names: tuple[str, ...], jobs: int) -> Iterator[list[Result]]:
    run = partial(run_seed, names=names)
    if jobs == 1:
        yield from map(run, seeds)
        return
    for name in names:  # what every seed needs is made before the processes begin
        size_of(name)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(run, seeds)


if __name__ == "__main__":
    sys.exit(main())
