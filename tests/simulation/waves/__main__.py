"""``python -m tests.simulation.waves``: runs many random schedules of a data-parallel group."""

import argparse
import sys
import time
from collections import Counter

from .schedule import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.waves", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000, help="how many to run (20000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    arguments = parser.parse_args()
    started = time.process_time()
    outcomes: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    violated: list[int] = []
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        result = run_seed(seed)
        outcomes += result.outcomes
        happened += result.happened
        if result.violations:
            violated.append(seed)
            print(f"seed {seed}:", *result.violations[:6], sep="\n  ")
    print(f"{arguments.schedules} schedules in {time.process_time() - started:.0f} s of processor time")
    print("requests:", *(f"{count:8} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    print("events:", *(f"{count:8} {kind}" for kind, count in happened.most_common()), sep="\n")
    print(f"violated: {violated[:20] or 'none'}")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
