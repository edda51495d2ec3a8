import asyncio
from collections.abc import Iterator

import pytest

from tests.services.gateway.fakes import FakeMesh
from tokenloom.client import Client, errors


@pytest.fixture
def blocking(mesh: FakeMesh) -> Iterator[Client]:
    with Client(mesh.grpc_address, timeout=30) as client:
        yield client


async def test_turns_continue_each_other(mesh: FakeMesh, blocking: Client) -> None:
    mesh.outputs.auto = ["x", "y", "z"]

    def converse() -> list[int]:
        with blocking.session() as session:
            first = session.generate("abc", max_tokens=5, stop_token_ids=[ord("z")])
            assert (first.text, first.outputs[0].finish_reason) == ("xyz", "stop")
            for chunk in session.stream([100, 101], stop_token_ids=[ord("z")]):
                assert chunk.text.startswith("x")
                break  # what is left of it does not disturb the next
            last = list(session.stream("d"))[-1]
            assert last.usage is not None
            return [first.usage.prompt_tokens, last.usage.prompt_tokens]

    assert await asyncio.to_thread(converse) == [3, len("abcxy") + 2 + len("xyd")]


async def test_leaving_cancels_the_turn(mesh: FakeMesh, blocking: Client) -> None:
    def begin() -> None:
        with blocking.session() as session:
            next(session.stream("abc"))

    leaving = asyncio.create_task(asyncio.to_thread(begin))
    submitted = await mesh.outputs.next_request()
    submitted.send("x", [1])
    await leaving
    async with asyncio.timeout(30):
        await submitted.cancelled.wait()


async def test_a_turn_that_is_refused_ends_the_session_and_says_why(mesh: FakeMesh, blocking: Client) -> None:
    mesh.outputs.auto = ["x"]

    def ask() -> None:
        with blocking.session() as session:
            session.generate("abc")
            with pytest.raises(errors.InvalidArgument, match="n must be 1 in a session"):
                session.generate("d", n=2)
            with pytest.raises(errors.TokenloomError):
                session.generate("d")
            with pytest.raises(errors.InvalidArgument, match="not available in a stream"):
                session.stream("d", prompt_logprobs=1)

    await asyncio.to_thread(ask)
