"""Prints the table of rules for each trace."""

import argparse

import numpy as np

from .. import placement
from .placers import PLACERS
from .simulation import simulate
from .traces import TRACES


def main() -> None:
    """Print a table for each trace: means over the seeds."""
    parser = argparse.ArgumentParser(
        description=placement.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    for trace in TRACES:
        print(f"\n{trace.name}, {trace.rate:g} requests/s on 16 engines\n")
        print("| rule | TTFT p50 ms | p99 ms | p99 / today's | max / mean load | cached |")
        print("|---|---|---|---|---|---|")
        today = 0.0
        for name, make in PLACERS.items():
            results = [simulate(trace, make, seed, options.seconds) for seed in options.seeds]
            p50, p99, imbalance, cached = (
                float(np.mean([getattr(each, field) for each in results]))
                for field in ("p50", "p99", "imbalance", "cached")
            )
            today = today or p99
            print(
                f"| {name} | {p50:.0f} | {p99:.0f} | {p99 / today:.2f} | {imbalance:.2f} | {cached:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
