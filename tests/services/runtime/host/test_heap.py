"""Tests when the garbage collector of a service makes a full pass."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.services.runtime.host.service import CHEAP_BLOCKS, MAX_GROWTH_BLOCKS, Heap


class Blocks:
    """Says how many blocks are in use."""

    def __init__(self) -> None:
        self.used = 1_000_000

    def __call__(self) -> int:
        return self.used


class Passes:
    """Counts the passes of the garbage collector by generation."""

    def __init__(self) -> None:
        self.of_generation = [0, 0, 0]

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.of_generation[info["generation"]] += 1

    @property
    def full(self) -> int:
        return self.of_generation[2]


@pytest.fixture
def passes() -> Iterator[Passes]:
    """Counts passes from the start of the test; afterwards the garbage collector works as before."""
    thresholds = gc.get_threshold()
    counter = Passes()
    gc.callbacks.append(counter)
    try:
        yield counter
    finally:
        gc.callbacks.remove(counter)
        gc.set_threshold(*thresholds)


def make_old_objects() -> None:
    """Let a pass of the middle generation happen, after which a full one finds something to do."""
    before = gc.get_count()[2]
    kept = []
    while gc.get_count()[2] == before:
        kept.append([kept])


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_burst_of_objects_makes_no_full_pass(passes: Passes, is_chosen: bool) -> None:
    """As many objects as 2,600 held requests of a gateway have."""
    if is_chosen:
        Heap().freeze()
    else:
        gc.freeze()
        gc.collect()  # so that what this process has made before does not matter
    before = passes.full
    held = [[] for _ in range(2600 * 130)]
    assert (passes.full > before) is not is_chosen
    assert passes.of_generation[1] > 0, "young objects are collected as usual"
    assert len(held) == 2600 * 130


def test_a_pass_runs_when_it_is_cheap(passes: Passes) -> None:
    blocks = Blocks()
    heap = Heap(blocks)
    heap.freeze()
    make_old_objects()
    before = passes.full
    blocks.used += CHEAP_BLOCKS
    for _ in range(9):
        heap.observe()
    assert passes.full == before
    heap.observe()
    assert passes.full == before + 1
    for _ in range(30):
        heap.observe()
    assert passes.full == before + 1, "nothing became old since"
    make_old_objects()
    heap.observe()
    assert passes.full == before + 2


def test_with_many_live_requests_only_growth_makes_a_pass(passes: Passes) -> None:
    blocks = Blocks()
    heap = Heap(blocks)
    heap.freeze()
    make_old_objects()
    before = passes.full
    blocks.used += MAX_GROWTH_BLOCKS
    for _ in range(30):
        heap.observe()
    assert passes.full == before
    blocks.used += 1
    heap.observe()
    assert passes.full == before + 1
    blocks.used += MAX_GROWTH_BLOCKS
    heap.observe()
    assert passes.full == before + 1, "it grew by no more since the last pass"


async def test_a_running_service_looks_after_its_heap(passes: Passes) -> None:
    heap = Heap(Blocks())
    heap.freeze()
    make_old_objects()
    before = passes.full
    task = asyncio.create_task(heap.run())
    for _ in range(12):
        await settle()
        pass_time(1.0)
    await settle()
    task.cancel()
    assert passes.full == before + 1
