"""``python -m tests.simulation``: runs many seeds and reports what was violated."""

import argparse
import logging
import time
from collections import Counter

from .runner import run_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        started = time.process_time()
        result = run_seed(seed)
        outcomes += result.outcomes
        print(
            seed,
            f"{time.process_time() - started:.3f}",
            f"{result.seconds:.1f}",
            result.num_frames,
            result.trace[:8],
            dict(result.outcomes),
            result.violations,
        )
    print(outcomes)


if __name__ == "__main__":
    main()
