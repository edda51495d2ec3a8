"""Runs one seed of a scenario."""

import asyncio
import gc
import hashlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from .chosen_loop import ChosenLoop
from .plan import UNKNOWN, Plan, Size, make_plan
from .scenarios import SCENARIOS
from .thread_calls import Crashed
from .watched_disk import WatchedDisk
from .world import Scenario, World

_BEGAN = 1_700_000_000
"""Seconds since 1970 when a run begins."""
_MEMORY_DISK = Path("/dev/shm")
_SHOWN = 60
"""Last steps of a schedule that are printed."""


@dataclass
class Result:
    """Reports one run.

    Attributes:
        size: How long it was.
        violations: What must not have been; empty after a good run.
        trace: What ran, if it was traced.
    """

    scenario: str
    plan: Plan
    size: Size = UNKNOWN
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A digest of the trace."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()


def run_seed(seed: int, names: tuple[str, ...] = tuple(SCENARIOS), *, is_traced: bool = False) -> list[Result]:
    """Run a seed of each scenario."""
    return [run_plan(name, make_plan(seed, size_of(name)), is_traced=is_traced) for name in names]


@cache
def size_of(name: str) -> Size:
    """Return how long the undisturbed run of a scenario is."""
    return run_plan(name, Plan(0, in_pieces=True)).size


def run_plan(name: str, plan: Plan, *, is_traced: bool = False) -> Result:
    """Run a scenario as a plan says; after a crash of the plan, also what comes after it."""
    result = Result(name, plan)
    with _folder() as directory, _collected(result):
        _run_processes(plan, directory, result, is_traced=is_traced)
    return result


def _run_processes(plan: Plan, directory: Path, result: Result, *, is_traced: bool) -> None:
    """Run a process, and the one after it if it crashes. Keeps nothing of them, so that all of it is collected."""
    scenario = SCENARIOS[result.scenario]()
    world = _run(scenario, plan, directory, result, is_traced=is_traced)
    result.size = Size(world.loop.num_awaits, world.disk.num_accesses)
    if world.disk.is_off:
        _run(scenario, plan.undisturbed(), directory, result, is_traced=is_traced, memory=world.memory)


def describe(result: Result) -> str:
    """Return the schedule of a violated seed, shortly: it is run once more for it."""
    again = run_plan(result.scenario, result.plan, is_traced=True)
    lines = [f"{result.scenario}, seed {result.plan.seed}: {result.plan}"]
    lines += [f"  ! {violation}" for violation in result.violations]
    steps = [f"{step}{f' ({number} times)' * (number > 1)}" for step, number in _counted(again.trace)]
    left_out = len(steps) - _SHOWN
    lines += [f"    … {left_out} steps"] if left_out > 0 else []
    return "\n".join([*lines, *(f"    {step}" for step in steps[-_SHOWN:])])


def _counted(trace: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each step with how often it follows itself."""
    return ((step, len(list(same))) for step, same in groupby(trace))


def _run(
    scenario: Scenario,
    plan: Plan,
    directory: Path,
    result: Result,
    *,
    is_traced: bool,
    memory: Mapping[str, Any] | None = None,
) -> World:
    """Run one process. ``memory``: of the process before it, which has crashed."""
    loop = ChosenLoop(plan, is_traced=is_traced)
    disk = WatchedDisk(directory, plan, loop.note, loop.crash)
    world = World(loop, Random(f"scenario {plan.seed}"), directory, disk)
    world.memory = dict(memory or {})
    with disk.installed(), loop.owns_threads(), _determined(loop, plan):
        try:
            loop.run(scenario.run(world) if memory is None else scenario.recover(world), name="scenario")
        except Crashed:
            pass
        except (Exception, asyncio.CancelledError) as error:
            world.violated(f"the run ended with {error!r}")
        finally:
            disk.is_off = disk.is_off or loop.has_crashed
            _end(loop)
    result.violations += [*world.violations, *loop.failures]
    result.trace += loop.trace
    return world


def _end(loop: ChosenLoop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what ends in the middle never awaits its last calls
        loop.end_threads()
        loop.close()


@contextmanager
def _folder() -> Iterator[Path]:
    parent = _MEMORY_DISK if os.access(_MEMORY_DISK, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="explorer", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _determined(loop: ChosenLoop, plan: Plan) -> Iterator[None]:
    """Give the run its clock and its random numbers."""
    random = Random(f"ids {plan.seed}")
    now, draw = time.time, os.urandom
    time.time, os.urandom = lambda: _BEGAN + loop.time(), random.randbytes
    try:
        yield
    finally:
        time.time, os.urandom = now, draw


@contextmanager
def _collected(result: Result) -> Iterator[None]:
    """Report what Python cannot raise, and collect at the end what the run has made. What a run leaves when it crashes,
    or is stuck, protests when it is collected, which is of no interest."""
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RuntimeError):
            result.violations.append(f"not raised: {unraisable.exc_value!r} in {unraisable.object!r}")

    sys.unraisablehook = report
    gc.freeze()  # the collection looks only at what the run has made
    gc.disable()
    try:
        yield
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
    finally:
        gc.enable()
        sys.unraisablehook = before
