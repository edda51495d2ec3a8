import asyncio

import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.client import AsyncClient, errors


async def test_turns_continue_each_other(mesh: FakeMesh, client: AsyncClient) -> None:
    async with client.session() as session:
        asking = asyncio.create_task(session.generate("abc", max_tokens=5, stop_token_ids=[ord("!")]))
        first = await mesh.outputs.next_request()
        assert first.submit.sampling_params.max_tokens == 5
        first.answer("Hi", "!")
        assert (await asking).text == "Hi!"
        mesh.outputs.auto = ["x", "y"]
        chunks = [chunk async for chunk in session.stream([100, 101])]
        assert "".join(chunk.text for chunk in chunks) == "xy"
        assert chunks[-1].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == len("abcHi") + 2


async def test_what_is_not_read_of_a_turn_does_not_disturb_the_next(mesh: FakeMesh, client: AsyncClient) -> None:
    mesh.outputs.auto = ["x", "y", "z"]
    async with client.session() as session:
        async for chunk in session.stream("abc", stop_token_ids=[ord("z")]):
            assert chunk.text.startswith("x")
            break
        answer = await session.generate("d")
        assert answer.text == "xyz"
        assert answer.usage.prompt_tokens == len("abcxyd")


async def test_leaving_cancels_the_turn(mesh: FakeMesh, client: AsyncClient) -> None:
    async with client.session() as session:
        asking = asyncio.create_task(session.generate("abc"))
        submitted = await mesh.outputs.next_request()
        asking.cancel()
    async with asyncio.timeout(30):
        await submitted.cancelled.wait()


async def test_a_turn_that_is_refused_ends_the_session_and_says_why(mesh: FakeMesh, client: AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    async with client.session() as session:
        await session.generate("abc")
        with pytest.raises(errors.InvalidArgument, match="n must be 1 in a session") as refusal:
            await session.generate("d", n=2)
        assert refusal.value.field == "n"
        for _ in range(2):
            with pytest.raises(errors.InvalidArgument, match="n must be 1 in a session"):
                await session.generate("d")
        with pytest.raises(errors.InvalidArgument, match="not available in a stream"):
            await anext(session.stream("d", prompt_logprobs=1))


async def test_a_turn_names_its_model(mesh: FakeMesh, client: AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    async with client.session() as session:
        assert (await session.generate("abc", model=MODEL)).text == "x"
        with pytest.raises(errors.ModelNotFound, match="'nope' is not served"):
            await session.generate("abc", model="nope")
    async with client.session() as session:
        with pytest.raises(errors.ModelNotFound, match="'nope' is not served"):
            await anext(session.stream("abc", model="nope"))


async def test_the_deadline_is_the_sessions(mesh: FakeMesh, client: AsyncClient) -> None:
    async with client.session(timeout=0.2) as session:
        with pytest.raises(errors.DeadlineExceeded):
            await session.generate("abc")


async def test_a_turn_goes_to_the_model_that_it_names(mesh: FakeMesh, client: AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    async with client.session() as session:
        assert (await session.generate("abc", model=MODEL)).text == "x"
    async with client.session() as session:
        with pytest.raises(errors.ModelNotFound):
            await session.generate("abc", model="another")
