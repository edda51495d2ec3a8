"""Prints what prompts and tokens wait for under rules that divide steps: ``python -m tests.engine_core.step_shares``.

A virtual clock makes each figure exact on any machine; the costs are those of qwen3-0.6b on two processors.
"""

import random
import statistics
from collections import deque

from tests.engine_core.planned_steps import TimedSteps

COSTS = (0.05, 0.0025, 0.0011, 0.02)
LIMITS = {"none": None, "by cost": 128}


def make_steps(limit: str) -> TimedSteps:
    return TimedSteps(*COSTS, prefill_tokens_beside_decode=LIMITS[limit])


def at_once(limit: str) -> TimedSteps:
    """Serve 96 requests of 128 tokens in and 128 out, 32 at a time, of which the first 32 come at once."""
    steps = make_steps(limit)
    names = deque(f"r{number}" for number in range(96))
    while names or steps.scheduler.requests:
        while names and len(steps.scheduler.requests) < 32:
            steps.add(names.popleft(), 128, 128)
        steps.step()
    return steps


def mixed(limit: str) -> TimedSteps:
    """Serve 200 requests, 0.7 a second at random times, a tenth of them with prompts of 2,000 tokens instead of 128."""
    steps, rng, at = make_steps(limit), random.Random(0), 0.0
    for number in range(200):
        at += rng.expovariate(0.7)
        while steps.now < at and steps.scheduler.requests:
            steps.step()
        steps.now = max(steps.now, at)
        is_long = rng.random() < 0.1
        steps.add(f"{'long' if is_long else 'short'} {number}", 2000 if is_long else 128, 64)
        steps.arrived(at)
    steps.finish()
    return steps


def line(seconds: list[float]) -> str:
    """Return the median and the 99th percentile."""
    return f"{statistics.median(seconds):.2f} / {statistics.quantiles(seconds, n=100)[98]:.2f}"


def main() -> None:
    for limit in LIMITS:
        steps = at_once(limit)
        rate = steps.num_tokens / steps.now
        print(f"| 32 at a time | {limit} | {rate:.0f} | {line(list(steps.first.values()))} | {line(steps.gaps)} |")
    for limit in LIMITS:
        steps = mixed(limit)
        for kind in ("short", "long"):
            first = [seconds for name, seconds in steps.first.items() if name.startswith(kind)]
            rate = steps.num_tokens / steps.now
            print(f"| mixed, {kind} | {limit} | {rate:.0f} | {line(first)} | {line(steps.gaps)} |")


if __name__ == "__main__":
    main()
