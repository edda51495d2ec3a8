"""A few seeds of the explorer: nothing is violated, a seed repeats exactly, and faults that are put back are found."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.explorer.bugs import BUGS, reintroduced, scenario_of
from tests.explorer.plan import Fault, make_plan
from tests.explorer.runner import describe, run_plan, run_seed, size_of
from tests.explorer.scenarios import SCENARIOS

SEEDS = 80
"""Of each scenario."""
SEEDS_OF_MESHES = 30
HUNTED = 200
TRACED = 3
PROGRAM = """
from tests.explorer.runner import run_seed
print(*(each.digest for seed in range({}) for each in run_seed(seed, is_traced=True)))
"""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """A full disk is logged, and so are the errors of clients."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_violated(scenario: str) -> None:
    size_of(scenario)  # whose run imports the rest
    descriptors = len(os.listdir("/proc/self/fd"))
    # A seed of the simulated mesh takes ten times as long as one of the others.
    for seed in range(SEEDS_OF_MESHES if scenario == "meshes" else SEEDS):
        (result,) = run_seed(seed, (scenario,))
        assert not result.violations, describe(result)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_seed_repeats_exactly_in_every_process() -> None:
    digests = [each.digest for seed in range(TRACED) for each in run_seed(seed, is_traced=True)]
    assert digests == [each.digest for seed in range(TRACED) for each in run_seed(seed, is_traced=True)]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command, root = [sys.executable, "-c", PROGRAM.format(TRACED)], Path(__file__).parent.parent.parent
    other = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    assert other.stdout.split() == digests
    assert len(set(digests)) > len(SCENARIOS)


@pytest.mark.parametrize("bug", BUGS)
def test_a_fault_that_is_put_back_is_found(bug: str) -> None:
    with reintroduced(bug):
        found = (run_seed(seed, (scenario_of(bug),))[0] for seed in range(HUNTED))
        violated = next((result for result in found if result.violations), None)
        assert violated is not None
        assert "!" in describe(violated)


def test_plans_cancel_at_every_await_and_interrupt_every_access() -> None:
    """The first plans take them one by one, so that no place is left to chance."""
    size = size_of("batches")
    assert size.awaits > 20
    assert size.accesses > 20
    plans = [make_plan(seed, size) for seed in range(4 * max(size.awaits, size.accesses) + 8)]
    single = {next(iter(plan.cancels)) for plan in plans if len(plan.cancels) == 1 and plan.fault is Fault.NONE}
    assert single >= set(range(size.awaits))
    assert {plan.is_broken for plan in plans if plan.fault is Fault.FULL} == {False, True}
    for fault in (Fault.CRASH, Fault.FULL):
        assert {plan.fault_at for plan in plans if plan.fault is fault} == set(range(size.accesses))


def test_a_schedule_is_short_and_names_what_is_wrong() -> None:
    with reintroduced("charged_by_call"):
        results = (run_plan("generations", make_plan(seed, size_of("generations"))) for seed in range(HUNTED))
        text = describe(next(result for result in results if result.violations))
    assert "more tokens were charged than computed" in text
    assert len(text.splitlines()) < 100
