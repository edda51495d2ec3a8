"""A gateway is lost in the middle of an answer, and the client's caller does not notice."""

import asyncio
from pathlib import Path

import pytest

from tokenloom.client import AsyncClient, Chunk, Client, Generation, Retries, errors

from .fake_gateway import TEXT, FakeGateway, FakeMesh

LIMIT = 30.0
STOPS = 5


@pytest.fixture
def lossy() -> FakeMesh:
    return FakeMesh()


class Caller:
    """Calls a method of either client."""

    def __init__(self, kind: str, address: str, retries: Retries | None = None) -> None:
        self._kind = kind
        self._address = address
        self._retries = retries

    async def stream(self, **options: int) -> list[Chunk]:
        if self._kind == "blocking":
            return await asyncio.to_thread(self._blocking_stream, options)
        async with AsyncClient(self._address, timeout=LIMIT, retries=self._retries) as client:
            return [chunk async for chunk in await client.stream("a", **options)]

    async def generate(self, **options: int) -> Generation:
        if self._kind == "blocking":
            return await asyncio.to_thread(self._blocking_generate, options)
        async with AsyncClient(self._address, timeout=LIMIT, retries=self._retries) as client:
            return await client.generate("a", **options)

    def _blocking_stream(self, options: dict[str, int]) -> list[Chunk]:
        with Client(self._address, timeout=LIMIT, retries=self._retries) as client:
            return list(client.stream("a", **options))

    def _blocking_generate(self, options: dict[str, int]) -> Generation:
        with Client(self._address, timeout=LIMIT, retries=self._retries) as client:
            return client.generate("a", **options)


@pytest.fixture(params=["asyncio", "blocking"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_stream_continues_through_the_next_gateway(kind: str, lossy: FakeMesh, socket_dir: Path) -> None:
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(lossy, socket_dir / "a", stops_at=STOPS) as first,
        FakeGateway(lossy, socket_dir / "b") as second,
    ):
        streaming = asyncio.create_task(Caller(kind, f"{first.address}, {second.address}").stream(n=2))
        await first.stopped.wait()
        await first.cut()
        chunks = await streaming
    for index in range(2):
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == TEXT
    assert lossy.calls == ["Generate request-0", "Resume request-0"]
    assert [(each.index, each.num_tokens, each.text_length) for each in lossy.resumed[0].positions] == [
        (0, 3, 3),
        (1, 2, 2),
    ]


async def test_a_stream_continues_when_the_gateway_is_back(kind: str, lossy: FakeMesh, socket_dir: Path) -> None:
    async with asyncio.timeout(LIMIT):
        async with FakeGateway(lossy, socket_dir / "a", stops_at=STOPS) as first:
            streaming = asyncio.create_task(Caller(kind, first.address).stream())
            await first.stopped.wait()
        async with FakeGateway(lossy, socket_dir / "a"):
            assert "".join(chunk.text for chunk in await streaming) == TEXT


async def test_a_call_without_an_answer_joins_its_request(kind: str, lossy: FakeMesh, socket_dir: Path) -> None:
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(lossy, socket_dir / "a", stops_at=0) as first,
        FakeGateway(lossy, socket_dir / "b") as second,
    ):
        asking = asyncio.create_task(Caller(kind, f"{first.address},{second.address}").generate())
        await first.stopped.wait()
        await first.cut()
        assert (await asking).text == TEXT
    assert lossy.calls == ["Generate request-0"] * 2


async def test_a_whole_answer_whose_request_is_lost_too_begins_anew(
    kind: str, lossy: FakeMesh, socket_dir: Path
) -> None:
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(lossy, socket_dir / "a", stops_at=STOPS) as first,
        FakeGateway(lossy, socket_dir / "b") as second,
    ):
        # No attempt is left for a call to the gateway that was cut.
        caller = Caller(kind, f"{first.address},{second.address}", Retries(max_retries=2))
        asking = asyncio.create_task(caller.generate())
        await first.stopped.wait()
        lossy.kept.clear()
        await first.cut()
        answer = await asking
    assert answer.text == TEXT
    assert answer.outputs[0].token_ids == list(map(ord, TEXT))
    assert lossy.calls == ["Generate request-0", "Resume request-0", "Generate request-1"]


async def test_a_stream_whose_request_is_lost_too_ends_with_an_error(
    kind: str, lossy: FakeMesh, socket_dir: Path
) -> None:
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(lossy, socket_dir / "a", stops_at=STOPS) as first,
        FakeGateway(lossy, socket_dir / "b") as second,
    ):
        streaming = asyncio.create_task(Caller(kind, f"{first.address},{second.address}").stream())
        await first.stopped.wait()
        lossy.kept.clear()
        await first.cut()
        with pytest.raises(errors.NotFound):
            await streaming


async def test_a_client_without_retries_reports_the_loss(kind: str, lossy: FakeMesh, socket_dir: Path) -> None:
    async with asyncio.timeout(LIMIT), FakeGateway(lossy, socket_dir / "a", stops_at=STOPS) as first:
        streaming = asyncio.create_task(Caller(kind, first.address, Retries(max_retries=0)).stream())
        await first.stopped.wait()
        await first.cut()
        with pytest.raises(errors.Unavailable):
            await streaming
