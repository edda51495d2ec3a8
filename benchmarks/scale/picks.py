"""Measures picks: their processor time in the registry, through ``PickStream``, and the memory of the prefix index.

``python -m tokenloom.bench.scale.picks [ENGINES]...`` prints what :func:`pick_cost`, :func:`stream` and
:func:`index_memory` return.
"""

import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc.aio
import psutil

from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.coordinator.engine_record import EngineRecord
from tokenloom.services.coordinator.engine_registry import Registry
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.supervisor.ports import reserved_ports
from tokenloom.v1.coordinator_pb2 import EngineReport, EngineState, PickBatch, PickRequest, PickResults
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import ENGINE_ROLE_BOTH, ENGINE_ROLE_PREFILL

from .child import Child
from .fake_engines import FINGERPRINT, NUM_BLOCKS, FakeIdentity
from .registry_case import Coordinator

ENGINES = (10, 100, 1000)
RATES = ((10_000, 0), (5_000, MAX_HASHES))
"""Picks per second, and the block hashes of each."""
_BLOCK_SIZE = 16
_NUM_PICKS = 2000
_NUM_PREFIXES = 1000
_NUM_STREAMS = 8
_TICK_SECONDS = 0.005
_MEMORY_PICKS = 80_000
"""Both generations of the index are full then: more picks replace what it has."""
_JOIN_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PickCost:
    """Processor microseconds of a pick, without hashes, and with 256 of which a part is new."""

    engines: int
    without_hashes: float
    with_hashes: float


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Describes picks of a rate through gRPC. Latencies include the process that asks.

    Attributes:
        cores: What the coordinator used, its reports and snapshots included.
        microseconds_a_pick: The same, for each pick that was answered.
    """

    engines: int
    hashes: int
    asked_per_second: float
    answered_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    cores: float
    microseconds_a_pick: float


@dataclass(frozen=True, slots=True)
class IndexMemory:
    """Resident MiB of a process with the registry: with engines only, and once each has had its cache's blocks."""

    engines: int
    empty: float
    full: float


def requests(count: int, num_hashes: int, seed: int = 1) -> list[PickRequest]:
    """Return picks. Their prompts share beginnings of many lengths with each other, and end in blocks of their own."""
    generator = random.Random(seed)
    prefixes = [[generator.getrandbits(64) for _ in range(num_hashes)] for _ in range(_NUM_PREFIXES)]

    def hashes() -> list[int]:
        shared = generator.choice(prefixes)[: generator.randrange(num_hashes + 1)] if num_hashes else []
        return shared + [generator.getrandbits(64) for _ in range(num_hashes - len(shared))]

    return [_request(hashes()) for _ in range(count)]


def _request(hashes: Sequence[int]) -> PickRequest:
    return PickRequest(
        fingerprint=FINGERPRINT,
        role=ENGINE_ROLE_PREFILL,
        prompt_tokens=len(hashes) * _BLOCK_SIZE + 500,
        block_hash_prefixes=hashes,
    )


class Clock:
    """Lets a millisecond pass for each pick, so that engines which report at each of their picks are never silent."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def registry_with(engines: int, clock: Callable[[], float]) -> tuple[Registry, dict[str, EngineRecord]]:
    """Return a registry with so many engines under different loads, and their records by name."""
    registry, generator = Registry(1, clock, settle_seconds=0.0), random.Random(2)
    reports = [_report(generator.randrange(64)) for _ in range(engines)]
    joined = [registry.join(FakeIdentity(number).registration(), report) for number, report in enumerate(reports)]
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
        for request in asked[:_NUM_PICKS]:
            registry.pick(request)
        began = time.process_time()
        for request in asked[_NUM_PICKS:]:
            registry.pick(request)
        costs.append((time.process_time() - began) / _NUM_PICKS * 1e6)
    return PickCost(engines, *costs)


def index_memory(engines: int) -> IndexMemory:
    """Fill the cache of every engine with prompts of which no two share a block: the most that can be remembered."""
    clock, generator = Clock(), random.Random(3)
    registry, records = registry_with(engines, clock)
    gc.collect()
    empty = _mebibytes()
    for _ in range(min(engines * NUM_BLOCKS // MAX_HASHES, _MEMORY_PICKS)):
        picked = registry.pick(_request([generator.getrandbits(64) for _ in range(MAX_HASHES)]))
        registry.report(records[picked.engine.engine_id], _report(generator.randrange(64), [picked.pick]))
        clock.seconds += 0.001
        registry.refresh()
    return IndexMemory(engines, empty, _mebibytes())


async def stream(engines: int, rate: int, num_hashes: int, seconds: float = 5.0) -> StreamResult:
    """Ask a coordinator with fake engines for so many picks per second, in batches of 5 ms over several streams.

    Raises ``TimeoutError`` when the engines do not join in time.
    """
    with reserved_ports("127.0.0.1", 1, 0, 0) as ports, ExitStack() as stack:
        address = f"127.0.0.1:{ports[0].grpc}"
        coordinator = Coordinator(address)
        stack.callback(coordinator.kill)
        for first in range(0, engines, 250):
            stack.enter_context(Child("fake_engines", address, first, min(250, engines - first)))
        async with Channels().open(address, "coordinator") as channel:
            await _until_all_are_picked(channel, engines)
            asked = requests(4000, num_hashes)
            await _ask(channel, asked, rate, 1.0)
            cpu, began = coordinator.cpu_seconds(), time.monotonic()
            latencies = sorted(await _ask(channel, asked, rate, seconds))
            elapsed, cpu = time.monotonic() - began, coordinator.cpu_seconds() - cpu
            return StreamResult(
                engines=engines,
                hashes=num_hashes,
                asked_per_second=rate,
                answered_per_second=len(latencies) / elapsed,
                p50_milliseconds=latencies[len(latencies) // 2] * 1e3,
                p99_milliseconds=latencies[len(latencies) * 99 // 100] * 1e3,
                cores=cpu / elapsed,
                microseconds_a_pick=cpu / len(latencies) * 1e6,
            )


async def _until_all_are_picked(channel: grpc.aio.Channel, engines: int) -> None:
    """Pick until every engine has had a pick: all have joined."""
    stub, names = CoordinatorStub(channel), set[str]()
    async with asyncio.timeout(_JOIN_SECONDS):
        while len(names) < engines:
            call = stub.PickStream()
            try:
                await call.read()
                await call.write(PickBatch(pick=[_request(())] * 4 * engines))
                count = 0
                while count < 4 * engines and isinstance(results := await call.read(), PickResults):
                    count += len(results.result)
                    names.update(each.response.engine.engine_id for each in results.result)
                    names.discard("")
            except grpc.aio.AioRpcError:
                pass
            finally:
                call.cancel()
            await asyncio.sleep(0.5)


async def _ask(channel: grpc.aio.Channel, asked: Sequence[PickRequest], rate: int, seconds: float) -> list[float]:
    """Send batches at their times, whether or not answers have come, and return the seconds until each answer."""
    per_stream = rate / _NUM_STREAMS

    async def one_stream(number: int) -> list[float]:
        call = CoordinatorStub(channel).PickStream()
        await call.read()
        sent: list[float] = []

        async def send() -> None:
            began = time.monotonic()
            while len(sent) < per_stream * seconds:
                due = int((time.monotonic() - began) * per_stream) - len(sent)
                if due > 0:
                    at = number * 997 + len(sent)
                    batch = [asked[index % len(asked)] for index in range(at, at + due)]
                    sent.extend([time.monotonic()] * due)
                    await call.write(PickBatch(pick=batch))
                await asyncio.sleep(_TICK_SECONDS)
            await call.done_writing()

        sending, latencies = asyncio.create_task(send()), list[float]()
        while isinstance(results := await call.read(), PickResults):
            now = time.monotonic()
            begin = len(latencies)
            latencies.extend(now - at for at in sent[begin : begin + len(results.result)])
        await sending
        return latencies

    return [each for part in await asyncio.gather(*map(one_stream, range(_NUM_STREAMS))) for each in part]


def _mebibytes() -> float:
    return float(psutil.Process(os.getpid()).memory_info().rss) / 2**20


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ENGINES):
        print(pick_cost(count))
        for rate, num_hashes in RATES:
            print(asyncio.run(stream(count, rate, num_hashes)))
    print(index_memory(max(map(int, sys.argv[1:] or ENGINES))))
