"""Asks a coordinator for many picks a second, as output processors do, and measures its answers."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

import grpc.aio

from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.runtime.telemetry.quantile import quantile
from tokenloom.v1.coordinator_pb2 import PickBatch, PickRequest, PickResults
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
_PICK_STREAM = "/tokenloom.v1.Coordinator/PickStream"
_WARM_UP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Describes picks of a rate through gRPC. Latencies count from the moment at which a pick is due, and include the
    process that asks.

    Attributes:
        answered_per_second: Until all that were asked were answered.
        here_p99_milliseconds: From reading a message with picks until its last answer was sent, in the coordinator.
        wait_share: For so much of the time the thread with the event loop waited for a core.
        cores: What the coordinator used, its reports and snapshots included.
        loop_cores: The part of it in the thread with the event loop, which cannot use more than one.
        microseconds_a_pick: What all threads of the coordinator used, for each pick that was answered.
        most_per_second: Picks that are answered if the streams ask for more as soon as they have answers.
    """

    hashes: int
    asked_per_second: float
    answered_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    here_p99_milliseconds: float
    wait_share: float
    cores: float
    loop_cores: float
    microseconds_a_pick: float
    most_per_second: float


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
    """Offer so many picks per second over several streams, and then as many as are answered."""
    asked = [PickBatch(pick=[each]).SerializeToString() for each in requests(_NUM_REQUESTS, num_hashes)]
    await _offer(channel, asked, rate, _WARM_UP_SECONDS)
    here, wait = await asyncio.to_thread(coordinator.pick_seconds), coordinator.loop_wait_seconds()
    cpu, loop, began = coordinator.cpu_seconds(), coordinator.loop_seconds(), time.monotonic()
    latencies = sorted(await _offer(channel, asked, rate, seconds))
    elapsed, cpu = time.monotonic() - began, coordinator.cpu_seconds() - cpu
    loop, wait = coordinator.loop_seconds() - loop, coordinator.loop_wait_seconds() - wait
    answered_within = await asyncio.to_thread(coordinator.pick_seconds)
    here_p99 = quantile({bound: count - here[bound] for bound, count in answered_within.items()}, 0.99) or 0.0
    return StreamResult(
        hashes=num_hashes,
        asked_per_second=rate,
        answered_per_second=len(latencies) / elapsed,
        p50_milliseconds=latencies[len(latencies) // 2] * 1e3,
        p99_milliseconds=latencies[len(latencies) * 99 // 100] * 1e3,
        here_p99_milliseconds=here_p99 * 1e3,
        wait_share=wait / elapsed,
        cores=cpu / elapsed,
        loop_cores=loop / elapsed,
        microseconds_a_pick=cpu / len(latencies) * 1e6,
        most_per_second=await _flood(channel, asked, seconds),
    )


async def _offer(channel: grpc.aio.Channel, asked: Sequence[bytes], rate: int, seconds: float) -> list[float]:
    """Ask for picks at their times, whether or not earlier ones were answered, and return the seconds from then until
    each answer. All of them are waited for, so that those of a coordinator that falls behind count too. As in an output
    processor, one message of a stream is unanswered at a time (:class:`.PickStream`)."""
    per_stream = rate / _NUM_STREAMS

    async def one_stream(number: int) -> list[float]:
        stream = await _Stream.open(channel, asked, number)
        latencies: list[float] = []
        began = time.monotonic() + number * _TICK_SECONDS / _NUM_STREAMS
        while (first := len(latencies)) < int(seconds * per_stream):
            due = int(min(time.monotonic() - began, seconds) * per_stream) - first
            if due <= 0:
                await asyncio.sleep(_TICK_SECONDS)
                continue
            async for count in stream.ask(min(due, _MAX_BATCH)):
                now, begin = time.monotonic(), len(latencies)
                latencies.extend(now - began - each / per_stream for each in range(begin, begin + count))
        stream.close()
        return latencies

    return [each for part in await asyncio.gather(*map(one_stream, range(_NUM_STREAMS))) for each in part]


async def _flood(channel: grpc.aio.Channel, asked: Sequence[bytes], seconds: float) -> float:
    """Return how many picks are answered in a second when each stream asks for more as soon as it has its answers."""

    async def one_stream(number: int) -> int:
        stream, answered = await _Stream.open(channel, asked, number), 0
        while time.monotonic() < began + seconds:
            async for count in stream.ask(_MAX_BATCH):
                answered += count
        stream.close()
        return answered

    began = time.monotonic()
    answered = sum(await asyncio.gather(*map(one_stream, range(_NUM_STREAMS))))
    return answered / (time.monotonic() - began)


class _Stream:
    """A stream of picks. Its messages are joined from serialized parts: to make them takes the processor time of the
    machine on which the coordinator is measured."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, PickResults]", asked: Sequence[bytes], number: int):
        self._call = call
        self._asked = asked
        self._next = number * len(asked) // _NUM_STREAMS

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, asked: Sequence[bytes], number: int) -> Self:
        """``asked``: messages with one pick each, which are sent again and again; ``number``: of the stream."""
        open_stream: grpc.aio.StreamStreamMultiCallable[bytes, PickResults] = channel.stream_stream(
            _PICK_STREAM, response_deserializer=PickResults.FromString
        )
        call = open_stream()
        await call.read()
        return cls(call, asked, number)

    async def ask(self, count: int) -> AsyncIterator[int]:
        """Send one message with so many picks; yield how many are answered, for each message that comes."""
        parts = [self._asked[(self._next + index) % len(self._asked)] for index in range(count)]
        self._next += count
        await self._call.write(b"".join(parts))
        while count > 0:
            results = await self._call.read()
            assert isinstance(results, PickResults)
            count -= len(results.result)
            yield len(results.result)

    def close(self) -> None:
        self._call.cancel()
