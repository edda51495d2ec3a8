"""Asks a coordinator for many picks a second, as output processors do, and measures its answers."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.v1.coordinator_pb2 import PickBatch, PickRequest, PickResults
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_PREFILL

from .coordinator_process import Coordinator
from .fake_engines import FINGERPRINT

RATES = ((10_000, 0), (5_000, MAX_HASHES))
"""Picks per second, and the block hashes of each."""
_BLOCK_SIZE = 16
_NUM_PREFIXES = 1000
_NUM_REQUESTS = 4000
_NUM_STREAMS = 8
"""Output processors that ask. Each has one stream."""
_TICK_SECONDS = 0.001
_MAX_BATCH = 256
_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Describes picks of a rate through gRPC. Latencies count from the moment at which a pick is due, and include the
    process that asks.

    Attributes:
        cores: What the coordinator used, its reports and snapshots included.
        loop_cores: The part of it in the thread with the event loop, which cannot use more than one.
        microseconds_a_pick: The same, for each pick that was answered.
    """

    hashes: int
    asked_per_second: float
    answered_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    cores: float
    loop_cores: float
    microseconds_a_pick: float


def requests(count: int, num_hashes: int, seed: int = 1) -> list[PickRequest]:
    """Return picks. Their prompts share beginnings of many lengths with each other, and end in blocks of their own."""
    generator = random.Random(seed)
    prefixes = [[generator.getrandbits(64) for _ in range(num_hashes)] for _ in range(_NUM_PREFIXES)]

    def hashes() -> list[int]:
        shared = generator.choice(prefixes)[: generator.randrange(num_hashes + 1)] if num_hashes else []
        return shared + [generator.getrandbits(64) for _ in range(num_hashes - len(shared))]

    return [request(hashes()) for _ in range(count)]


def request(hashes: Sequence[int]) -> PickRequest:
    """Return a pick of a prompt with so many hashes."""
    return PickRequest(
        fingerprint=FINGERPRINT,
        role=ENGINE_ROLE_PREFILL,
        prompt_tokens=len(hashes) * _BLOCK_SIZE + 500,
        block_hash_prefixes=hashes,
    )


async def measure(
    channel: grpc.aio.Channel, coordinator: Coordinator, rate: int, num_hashes: int, seconds: float
) -> StreamResult:
    """Ask for so many picks per second over several streams."""
    asked = requests(_NUM_REQUESTS, num_hashes)
    await _ask(channel, asked, rate, _WARM_UP_SECONDS)
    cpu, loop, began = coordinator.cpu_seconds(), coordinator.loop_seconds(), time.monotonic()
    latencies = sorted(await _ask(channel, asked, rate, seconds))
    elapsed, cpu = time.monotonic() - began, coordinator.cpu_seconds() - cpu
    loop = coordinator.loop_seconds() - loop
    return StreamResult(
        hashes=num_hashes,
        asked_per_second=rate,
        answered_per_second=len(latencies) / elapsed,
        p50_milliseconds=latencies[len(latencies) // 2] * 1e3,
        p99_milliseconds=latencies[len(latencies) * 99 // 100] * 1e3,
        cores=cpu / elapsed,
        loop_cores=loop / elapsed,
        microseconds_a_pick=cpu / len(latencies) * 1e6,
    )


async def _ask(channel: grpc.aio.Channel, asked: Sequence[PickRequest], rate: int, seconds: float) -> list[float]:
    """Ask for picks at their times, and return the seconds from then until each answer. As in an output processor, one
    message of a stream is unanswered at a time (:class:`.PickStream`)."""
    per_stream = rate / _NUM_STREAMS

    async def one_stream(number: int) -> list[float]:
        call = CoordinatorStub(channel).PickStream()
        await call.read()
        latencies: list[float] = []
        began = time.monotonic() + number * _TICK_SECONDS / _NUM_STREAMS
        while (now := time.monotonic()) < began + seconds:
            first = len(latencies)
            if (due := min(int((now - began) * per_stream) - first, _MAX_BATCH)) <= 0:
                await asyncio.sleep(_TICK_SECONDS)
                continue
            batch = (asked[(number * 997 + index) % len(asked)] for index in range(first, first + due))
            await call.write(PickBatch(pick=batch))
            while len(latencies) < first + due:
                results = await call.read()
                assert isinstance(results, PickResults)
                now, begin = time.monotonic(), len(latencies)
                latencies.extend(now - began - each / per_stream for each in range(begin, begin + len(results.result)))
        call.cancel()
        return latencies

    return [each for part in await asyncio.gather(*map(one_stream, range(_NUM_STREAMS))) for each in part]
