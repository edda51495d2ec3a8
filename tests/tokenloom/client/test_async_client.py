"""The client for asyncio, against a real gateway."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.services.gateway.fakes import EOS, MODEL, FakeMesh
from tokenloom.client import AsyncClient, Retries, errors
from tokenloom.v1 import types_pb2


async def test_models(client: AsyncClient) -> None:
    (model,) = await client.models()
    assert (model.name, model.max_model_len) == (MODEL, 512)


async def test_a_whole_answer(mesh: FakeMesh, client: AsyncClient) -> None:
    asking = asyncio.create_task(client.generate("abc", stop="END", request_id="mine", return_timeline=True))
    submitted = await mesh.outputs.next_request()
    assert bytes(submitted.submit.prompt.token_ids) == b"abc"
    assert submitted.submit.text.stop == ["END"]
    submitted.answer("Hi", " you", stop_reason="END")
    answer = await asking
    (output,) = answer.outputs
    assert (answer.text, output.token_ids) == ("Hi you", list(b"Hi you"))
    assert (output.finish_reason, output.stop_reason) == ("stop", "END")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 6, 1)
    assert answer.timeline is not None
    assert answer.timeline.queued_ns == 2_000_000
    assert answer.prompt_token_ids is None


async def test_only_what_was_given_is_sent(mesh: FakeMesh, client: AsyncClient) -> None:
    mesh.outputs.auto = None
    asking = asyncio.create_task(client.generate([1, 2], temperature=0.5, return_prompt_token_ids=True))
    submitted = await mesh.outputs.next_request()
    sampling = submitted.submit.sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 7, 16)  # top_k is the model's default
    assert list(sampling.stop_token_ids) == [EOS]
    submitted.answer("x")
    assert (await asking).prompt_token_ids == [1, 2]


async def test_chat(mesh: FakeMesh, client: AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    answer = await client.chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": "Ann"}],
        template_kwargs={"enable_thinking": False, "depth": 3, "share": 0.5, "list": [1, None]},
        add_generation_prompt=False,
    )
    assert answer.text == "x"
    (seen,) = mesh.tokenizer.chats + mesh.second_tokenizer.chats
    assert json.loads(seen.messages_json)[1] == {"role": "user", "content": "hi", "name": "Ann"}
    kwargs = json.loads(seen.template_kwargs_json)
    assert kwargs == {"enable_thinking": False, "depth": 3, "share": 0.5, "list": [1, None]}
    assert isinstance(kwargs["depth"], int)
    assert not seen.add_generation_prompt


async def test_a_stream(mesh: FakeMesh, client: AsyncClient) -> None:
    streaming = asyncio.create_task(client.stream("abc"))
    submitted = await mesh.outputs.next_request()
    submitted.send("Hi", list(b"Hi"))
    async with await streaming as stream:
        first = await anext(stream)
        assert (first.text, first.token_ids, first.finish_reason) == ("Hi", list(b"Hi"), None)
        submitted.finish(types_pb2.FINISH_REASON_LENGTH)
        (last,) = [chunk async for chunk in stream]
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


@pytest.mark.parametrize("leaving", ["break", "close", "with", "task"])
async def test_who_leaves_cancels_the_request(mesh: FakeMesh, client: AsyncClient, leaving: str) -> None:
    async def listen() -> None:
        if leaving == "break":
            async for _ in await client.stream("abc"):
                break
        elif leaving == "with":
            async with await client.stream("abc"):
                pass
        elif leaving == "close":
            stream = await client.stream("abc")
            stream.close()
        else:
            await client.generate("abc")

    listening = asyncio.create_task(listen())
    submitted = await mesh.outputs.next_request()
    submitted.send("Hi", [1, 2])
    if leaving == "task":
        listening.cancel()
    async with asyncio.timeout(30):
        await submitted.cancelled.wait()
    await asyncio.wait([listening])
    assert listening.cancelled() == (leaving == "task")


async def test_what_is_full_is_tried_again_when_it_says(mesh: FakeMesh, client: AsyncClient) -> None:
    asking = asyncio.create_task(client.generate("abc"))
    (await mesh.outputs.next_request()).fail(errors.ResourceExhausted("full", retry_after=0.01))
    (await mesh.outputs.next_request()).fail(errors.Unavailable("gone", retry_after=0.01))
    (await mesh.outputs.next_request()).answer("x")
    assert (await asking).text == "x"


async def test_a_stream_that_gave_something_is_not_tried_again(mesh: FakeMesh, client: AsyncClient) -> None:
    streaming = asyncio.create_task(client.stream("abc"))
    (await mesh.outputs.next_request()).fail(errors.Unavailable("gone", retry_after=0.01))
    submitted = await mesh.outputs.next_request()
    submitted.send("Hi", [1, 2])
    stream = await streaming
    submitted.fail(errors.Unavailable("gone", retry_after=0.01))
    assert (await anext(stream)).text == "Hi"
    with pytest.raises(errors.Unavailable, match="gone"):
        await anext(stream)


async def test_no_more_often_than_allowed(mesh: FakeMesh) -> None:
    async with AsyncClient(mesh.grpc_address, retries=Retries(max_retries=1)) as client:
        asking = asyncio.create_task(client.generate("abc"))
        for _ in range(2):
            (await mesh.outputs.next_request()).fail(errors.Unavailable("gone", retry_after=0.01))
        with pytest.raises(errors.Unavailable, match="gone"):
            await asking


async def test_what_is_wrong_is_named_and_not_tried_again(mesh: FakeMesh, client: AsyncClient) -> None:
    with pytest.raises(errors.InvalidArgument, match="temperature") as caught:
        await client.generate("abc", temperature=-1)
    assert caught.value.field == "temperature"
    with pytest.raises(errors.ModelNotFound):
        await client.generate("abc", model="other")
    with pytest.raises(errors.InvalidArgument, match="template_kwargs"):
        await client.chat([{"role": "user", "content": "x"}], template_kwargs={"x": float("nan")})


async def test_the_deadline_holds(mesh: FakeMesh, client: AsyncClient) -> None:
    for seconds in (0.3, 3.0, 30.0):  # on a busy machine the request needs longer to arrive
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("abc", timeout=seconds)
        if not mesh.outputs.requests.empty():
            break
    submitted = await mesh.outputs.next_request()
    async with asyncio.timeout(30):
        await submitted.cancelled.wait()


async def test_an_api_key(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("secret",)) as mesh:
        async with AsyncClient(mesh.grpc_address, api_key="secret") as client:
            assert (await client.models())[0].name == MODEL
        async with AsyncClient(mesh.grpc_address, api_key="other") as client:
            with pytest.raises(errors.Unauthenticated):
                await client.models()
