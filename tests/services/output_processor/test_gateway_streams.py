"""A drain reaches every gateway: it is announced before anything is refused, and moves what is left."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from tests.services.output_processor.fakes import SOON, submit
from tokenloom.request.errors import Unavailable
from tokenloom.services.output_processor.gateway_stream import GatewayStream, GatewayStreams
from tokenloom.services.output_processor.request.kept_requests import KeptRequests
from tokenloom.services.output_processor.request.requests import LiveRequestLimit, Requests, SampleGroup
from tokenloom.services.output_processor.request.telemetry import OutputProcessorMetrics
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.peers.retry_budget import RetryBudget
from tokenloom.v1.output_processor_pb2 import ProcessFrame, ProcessInput

MAX_BYTES = 1 << 20


class NoPlacer:
    """Never finds an engine."""

    budget = RetryBudget(lambda: 0.0)

    def ask(self, _: object) -> None:
        return None

    at_once = ask

    def is_open(self, *_: object) -> bool:
        return False

    def is_shared(self, *_: object) -> bool:
        return False

    def check(self, *_: object) -> None:
        """No link ends."""

    async def place(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()


class Gateway:
    """One gateway's stream, in memory."""

    def __init__(self, requests: Requests, sessions: GatewayStreams) -> None:
        self._session = GatewayStream(make_hello("op", 1), requests)
        self._sessions = sessions
        self._inputs: asyncio.Queue[ProcessInput] = asyncio.Queue()
        self._frames: asyncio.Queue[ProcessFrame] = asyncio.Queue()
        self.ended = asyncio.create_task(self._run())

    def send(self, **fields: Any) -> None:
        self._inputs.put_nowait(ProcessInput(**fields))

    @property
    def num_frames(self) -> int:
        """Frames that were not read."""
        return self._frames.qsize()

    async def read(self) -> ProcessFrame:
        """The next frame that is no heartbeat."""
        while (frame := await asyncio.wait_for(self._frames.get(), SOON)) == ProcessFrame():
            pass
        return frame

    async def _run(self) -> None:
        with self._sessions.joined(self._session):
            await self._session.run(self._messages(), self._frames.put)

    async def _messages(self) -> AsyncIterator[ProcessInput]:
        while True:
            yield await self._inputs.get()


class Drained:
    """Streams of an output processor that drains."""

    def __init__(self, tokenizer: Tokenizer, max_requests: int = 8) -> None:
        metrics = OutputProcessorMetrics(CollectorRegistry(), lambda: 0, lambda: 0)
        placer: Any = NoPlacer()
        kept = KeptRequests[SampleGroup](lambda error: None, 60.0, 1 << 20)
        self.requests = Requests(
            placer,
            Vocabulary(tokenizer),
            frozenset(),
            metrics,
            limit=LiveRequestLimit(max_requests, MAX_BYTES),
            kept=kept,
        )
        self.sessions = GatewayStreams()

    async def gateway(self, credit: int = 100) -> tuple[Gateway, ProcessFrame]:
        gateway = Gateway(self.requests, self.sessions)
        gateway.send(hello=make_hello("gateway", 5, initial_credit=credit))
        return gateway, await gateway.read()


@pytest.fixture
def drained(byte_level_tokenizer: Tokenizer) -> Drained:
    return Drained(byte_level_tokenizer)


def moved(frame: ProcessFrame) -> list[tuple[int, int]]:
    assert {end.error.reason for end in frame.finished} == {"TRY_ELSEWHERE"}
    return [(end.slot, end.sample_index) for end in frame.finished]


async def test_leaving_is_announced_before_a_request_is_refused(drained: Drained) -> None:
    (one, hello), (two, _) = await drained.gateway(), await drained.gateway(credit=0)
    assert not hello.leaving
    drained.sessions.leave()
    drain = asyncio.create_task(drained.requests.drain())
    one.send(submit=[submit(1, num_samples=2)])
    assert await one.read() == ProcessFrame(leaving=True)
    assert moved(await one.read()) == [(1, 0)]
    assert await two.read() == ProcessFrame(leaving=True), "it needs no credit"
    await drain
    await drained.sessions.close()
    assert one.ended.done()
    assert two.ended.done()


async def test_a_gateway_that_connects_later_hears_it_with_the_hello(drained: Drained) -> None:
    drained.sessions.leave()
    _, hello = await drained.gateway()
    assert hello.leaving
    await drained.sessions.close()


async def test_live_requests_move_with_every_sample_and_the_stream_ends_when_that_was_read(drained: Drained) -> None:
    gateway, _ = await drained.gateway()
    gateway.send(submit=[submit(1), submit(2, num_samples=2)])
    async with asyncio.timeout(SOON):
        while drained.requests.num_live < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    drained.sessions.leave()
    drained.sessions.move()
    await drained.requests.drain()
    await drained.sessions.close()
    assert await gateway.read() == ProcessFrame(leaving=True)
    assert sorted(moved(await gateway.read())) == [(1, 0), (2, 0), (2, 1)]
    assert gateway.ended.done()


async def test_without_a_drain_the_streams_end_at_once_and_answer_nothing(drained: Drained) -> None:
    gateway, _ = await drained.gateway()
    gateway.send(submit=[submit(1)])
    async with asyncio.timeout(SOON):
        while not drained.requests.num_live:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await drained.sessions.close()
    assert isinstance(gateway.ended.exception(), Unavailable)
    assert gateway.num_frames == 0
    assert not drained.requests.num_live


@pytest.mark.parametrize("count", [1, 9])
async def test_a_full_output_processor_names_another(drained: Drained, count: int) -> None:
    gateway, _ = await drained.gateway()
    if count == 1:
        gateway.send(submit=[submit(1, num_samples=8)])
    gateway.send(submit=[submit(2, num_samples=count)])
    assert moved(await gateway.read()) == [(2, 0)]
    gateway.ended.cancel()
