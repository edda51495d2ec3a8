"""Completions over HTTP: several prompts, stop reasons, token ids."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.services.gateway.fakes import EOS, FakeMesh, FakeRequest
from tokenloom.request import errors
from tokenloom.v1 import types_pb2


async def start(
    mesh: FakeMesh, http: httpx.AsyncClient, **fields: Any
) -> tuple["asyncio.Task[httpx.Response]", list[FakeRequest]]:
    task = asyncio.create_task(http.post("/v1/completions", json=fields))
    prompt = fields["prompt"]
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return task, [await mesh.outputs.next_request() for _ in range(count)]


async def test_several_prompts_answer_in_their_order(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, requests = await start(mesh, http, prompt=["a", "bb", "ccc"])
    assert [bytes(r.submit.prompt.token_ids) for r in requests] == [b"a", b"bb", b"ccc"]
    assert len({r.submit.sampling_params.seed for r in requests}) == 1
    for request in reversed(requests):
        request.answer(f"after {len(request.submit.prompt.token_ids)}")
    body = (await task).json()
    assert [choice["text"] for choice in body["choices"]] == ["after 1", "after 2", "after 3"]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 21


async def test_a_stream_interleaves_prompts(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, (one, two) = await start(
        mesh, http, prompt=[[1], [2]], stream=True, return_token_ids=True, stream_options={"include_usage": True}
    )
    two.send("2a", [7])
    one.send("1a", [8])
    two.answer("2b")
    one.answer("1b", reason=types_pb2.FINISH_REASON_LENGTH)
    *lines, done = [line.removeprefix("data: ") for line in (await task).text.split("\n\n") if line]
    assert done == "[DONE]"
    *events, usage = [json.loads(line) for line in lines]
    for index, ids in ((0, [8, 49, 98]), (1, [7, 50, 98])):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == f"{index + 1}a{index + 1}b"
        assert [i for choice in mine for i in choice["token_ids"]] == ids
        assert mine[0]["prompt_token_ids"] == [index + 1]
        assert all("prompt_token_ids" not in choice for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == ("stop", "length")[index == 0]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6


async def test_an_error_of_one_prompt_is_the_requests(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task, (one, two) = await start(mesh, http, prompt=["a", "b"])
    one.fail(errors.Unavailable("gone"))
    assert (await task).status_code == 503
    await asyncio.wait_for(two.cancelled.wait(), 30)


async def test_stop_reason_is_the_clients_own(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    async def reason(told: str, **fields: Any) -> Any:
        task, (request,) = await start(mesh, http, prompt="a", **fields)
        request.answer("x", stop_reason=told)
        return (await task).json()["choices"][0]["stop_reason"]

    assert await reason("END", stop="END") == "END"
    assert await reason("7", stop=["7"]) == "7"
    assert await reason("7", stop_token_ids=[7]) == 7
    assert await reason(str(EOS)) is None


async def test_max_tokens_is_16_or_the_rest_of_the_context(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    for prompt, expected in (([1], 16), ([1] * 509, 3)):
        task, (request,) = await start(mesh, http, prompt=prompt)
        assert request.submit.sampling_params.max_tokens == expected
        request.answer("x")
        await task


async def test_a_model_may_state_more_than_its_engine_takes(socket_dir: Path) -> None:
    """An end token beyond the vocabulary, an output longer than the context: neither is the client's mistake."""
    fake = FakeMesh(socket_dir)
    for tokenizer in (fake.tokenizer, fake.second_tokenizer):
        tokenizer.eos_token_ids = [EOS, 100_000]
        tokenizer.defaults = types_pb2.SamplingParams(max_tokens=100_000)
    async with fake.gateway() as mesh, mesh.http() as http:
        task, (request,) = await start(mesh, http, prompt=[1] * 12)
        request.answer("x")
        assert (await task).status_code == 200
    assert list(request.submit.sampling_params.stop_token_ids) == [EOS]
    assert request.submit.sampling_params.max_tokens == 500


async def test_too_many_prompts_are_wrong_however_busy_the_gateway_is(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(max_live_requests=1) as mesh, mesh.http() as http:
        task, (request,) = await start(mesh, http, prompt="a")
        response = await http.post("/v1/completions", json={"prompt": ["a"] * 1025})
        request.answer("x")
        await task
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
