"""Asks a coordinator for many picks a second, as output processors do, and times its answers."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self

import grpc.aio

from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.v1.coordinator_pb2 import PickRequest, PickResults
from tokenloom.v1.types_pb2 import ENGINE_ROLE_PREFILL

from .fake_engines import FINGERPRINT

_BLOCK_SIZE = 16
_NUM_PREFIXES = 1000
_LONG_TOKENS = 100_000
_LONG_EVERY = 10
"""Of prompts that name as many blocks as there are names, every tenth is that long."""
_NUM_STREAMS = 8
"""Output processors that ask. Each has one stream."""
_TICK_SECONDS = 0.001
_MAX_BATCH = 256
_PICK_STREAM = "/tokenloom.v1.Coordinator/PickStream"


def requests(count: int, num_hashes: int, seed: int = 1) -> list[PickRequest]:
    """Return picks. Their prompts share beginnings of many lengths with each other, and end in blocks of their own."""
    generator = random.Random(seed)
    prefixes = [[generator.getrandbits(64) for _ in range(num_hashes)] for _ in range(_NUM_PREFIXES)]

    def hashes() -> list[int]:
        shared = generator.choice(prefixes)[: generator.randrange(num_hashes + 1)] if num_hashes else []
        return shared + [generator.getrandbits(64) for _ in range(num_hashes - len(shared))]

    return [
        request(hashes(), _LONG_TOKENS if num_hashes == MAX_HASHES and not number % _LONG_EVERY else 0)
        for number in range(count)
    ]


def request(hashes: Sequence[int], prompt_tokens: int = 0) -> PickRequest:
    """Return a pick of a prompt with these hashes. ``prompt_tokens``: 0: a few more than its first blocks have."""
    return PickRequest(
        fingerprint=FINGERPRINT,
        role=ENGINE_ROLE_PREFILL,
        prompt_tokens=prompt_tokens or len(hashes) * _BLOCK_SIZE + 500,
        block_hash_prefixes=hashes,
    )


async def offer(channel: grpc.aio.Channel, asked: Sequence[bytes], rate: int, seconds: float) -> list[float]:
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


async def flood(channel: grpc.aio.Channel, asked: Sequence[bytes], seconds: float) -> float:
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
