"""Measures the registry alone: the processor time of a pick, and the memory of the prefix index.

``python -m tokenloom.bench.scale.picks [ENGINES]...`` prints what :func:`pick_cost` and :func:`index_memory` return.
"""

import contextlib
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.coordinator.coordinator_servicer import NATIVE_ENGINES
from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD, PLACEMENT
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.native_placement import load_library, use_natively
from tokenloom.services.runtime.placement.rules import RULES
from tokenloom.v1.coordinator_pb2 import EngineReport, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import ENGINE_ROLE_BOTH

from .fake_engines import NUM_BLOCKS, FakeIdentity
from .pick_load import request, requests

ENGINES = (10, 100, 1000)
_NUM_PICKS = 4000
_PICKS_OF_A_ROUND = 100
_MEMORY_PICKS = 80_000
"""Both generations of the index are full then: more picks replace what it has."""
_PICKS_OF_A_REFRESH = 100


@dataclass(frozen=True, slots=True)
class PickCost:
    """Processor microseconds of a pick, without hashes, and with 256 of which a part is new.

    They are the lower quartile of rounds of 100 picks: other programs of the machine slow some rounds down.
    """

    engines: int
    without_hashes: float
    with_hashes: float


@dataclass(frozen=True, slots=True)
class IndexMemory:
    """Resident MiB of a process with the registry: with engines only, and once each has had its cache's blocks."""

    engines: int
    empty: float
    full: float


class Clock:
    """Lets a millisecond pass for each pick, so that engines which report in turn are not late for long."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def registry_with(engines: int, clock: Callable[[], float]) -> tuple[Registry, dict[str, EngineRecord]]:
    """Return a registry with so many engines under different loads, and their records by name."""
    policy = Policy(PD_THRESHOLD, RULES[PLACEMENT])
    registry, generator = Registry(1, clock, policy=policy, settle_seconds=0.0), random.Random(2)
    reports = [_report(generator.randrange(64)) for _ in range(engines)]
    joined = [registry.join(FakeIdentity(number).registration(), report) for number, report in enumerate(reports)]
    if engines >= NATIVE_ENGINES:  # as a coordinator does
        with contextlib.suppress(KernelsUnavailable):
            use_natively(registry, load_library())
    return registry, {record.identity.engine_id: record for record in joined}


def _report(running: int, picks: Sequence[PickId] = ()) -> EngineReport:
    return EngineReport(
        role=ENGINE_ROLE_BOTH,
        state=EngineState.ENGINE_STATE_SERVING,
        free_kv_blocks=NUM_BLOCKS,
        running=running,
        picks_arrived=picks,
    )


def pick_cost(engines: int) -> PickCost:
    """Measure picks of the registry alone."""
    registry, _ = registry_with(engines, time.monotonic)
    costs = []
    for num_hashes in (0, MAX_HASHES):
        asked = requests(2 * _NUM_PICKS, num_hashes)
        for each in asked[:_NUM_PICKS]:
            registry.pick(each)
        rounds = [
            _microseconds(registry, asked[begin : begin + _PICKS_OF_A_ROUND])
            for begin in range(_NUM_PICKS, 2 * _NUM_PICKS, _PICKS_OF_A_ROUND)
        ]
        costs.append(sorted(rounds)[len(rounds) // 4])
    return PickCost(engines, *costs)


def _microseconds(registry: Registry, asked: Sequence[PickRequest]) -> float:
    """Return the processor time of each of some picks."""
    began = time.process_time()
    for each in asked:
        registry.pick(each)
    return (time.process_time() - began) / len(asked) * 1e6


def index_memory(engines: int) -> IndexMemory:
    """Fill the cache of every engine with prompts of which no two share a block: the most that can be remembered."""
    clock, generator = Clock(), random.Random(3)
    registry, records = registry_with(engines, clock)
    gc.collect()
    empty = _mebibytes()
    all_records = list(records.values())
    for number in range(min(engines * NUM_BLOCKS // MAX_HASHES, _MEMORY_PICKS)):
        picked = registry.pick(request([generator.getrandbits(64) for _ in range(MAX_HASHES)]))
        registry.report(records[picked.engine.engine_id], _report(generator.randrange(64), [picked.pick]))
        # All others report too, or they would be late, get no picks, and so never report again.
        registry.report(all_records[number % engines], _report(generator.randrange(64)))
        clock.seconds += 0.001
        if number % _PICKS_OF_A_REFRESH == 0:
            registry.refresh()
    return IndexMemory(engines, empty, _mebibytes())


def _mebibytes() -> float:
    return float(psutil.Process(os.getpid()).memory_info().rss) / 2**20


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ENGINES):
        print(pick_cost(count))
        print(index_memory(count))
