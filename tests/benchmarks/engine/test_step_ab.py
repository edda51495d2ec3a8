"""The comparison of two trees, on one tree at a small size, and what it makes of measurements."""

import json
from pathlib import Path

from tokenloom.bench.engine import step_ab
from tokenloom.bench.engine.step_loop import SAMPLING, StepLoop

TREE = Path(__file__).parents[3]


class Slow:
    """Measures what it is told."""

    def __init__(self, *microseconds):
        self.microseconds = list(microseconds)
        self.calls = 0

    def measure(self, rows, sampling, steps):
        self.calls += 1
        return self.microseconds[(self.calls - 1) % len(self.microseconds)]


def test_the_median_of_the_pairs_ratios_counts():
    base, ours = Slow(99, 100, 200, 400), Slow(99, 102, 204, 800)
    report = step_ab.compare(base, ours, 32, "greedy", pairs=3, steps=5)
    assert (base.calls, ours.calls) == (4, 4)
    assert (report["base_us"], report["ours_us"], report["ratio"]) == (200, 204, 1.02)


def test_a_tree_against_itself(capsys):
    arguments = ["--base", str(TREE), "--pairs", "1", "--steps", "2", "--rows", "3", "--limit", "-1"]
    assert step_ab.main(arguments) == 1
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(report["rows"], report["sampling"]) for report in reports] == [(3, name) for name in SAMPLING]
    assert all(report["base_us"] > 0 for report in reports)


def test_every_request_draws_in_every_step():
    loop = StepLoop(5, "top-p")
    assert loop.measure(3) > 0
    assert len(loop._core.step().outputs) == 5
