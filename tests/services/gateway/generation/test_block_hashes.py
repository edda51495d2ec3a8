"""The tokenizer's block hashes of a prompt reach the output processor."""

import asyncio

import httpx
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"model": MODEL, "prompt": "once", "max_tokens": 5})],
)
async def test_block_hashes_go_on_with_the_request(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    task = asyncio.create_task(http.post(path, json=body))
    request = await mesh.outputs.next_request()
    assert list(request.submit.block_hash_prefixes) == [sum(request.submit.prompt.token_ids)]
    request.answer("x")
    assert (await task).status_code == 200


async def test_each_prompt_of_a_batch_has_its_own(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 5}
    task = asyncio.create_task(http.post("/v1/completions", json=body))
    for _ in range(2):
        request = await mesh.outputs.next_request()
        assert list(request.submit.block_hash_prefixes) == list(request.submit.prompt.token_ids)
        request.answer("x")
    assert (await task).status_code == 200
