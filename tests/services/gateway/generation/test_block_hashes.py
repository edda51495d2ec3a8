"""Block hashes of a prompt reach the output processor: the tokenizer's, or the gateway's own for token ids."""

import asyncio

import httpx
import pytest

from tests.services.gateway.fakes import BLOCK_SIZE, MODEL, FakeMesh
from tokenloom.request.prefix_schedule import prefix_hashes
from tokenloom.services.gateway.generation import encoded_prompt
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

IDS = [number % 200 for number in range(3 * BLOCK_SIZE + 5)]
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


@pytest.mark.parametrize(
    ("options", "hashed"),
    [({}, IDS), ({"truncate_prompt_tokens": 40}, IDS[-40:])],
    ids=["all of them", "their end"],
)
async def test_a_prompt_of_token_ids_is_hashed_by_the_gateway(
    mesh: FakeMesh, http: httpx.AsyncClient, options: dict[str, object], hashed: list[int]
) -> None:
    body = {"model": MODEL, "prompt": IDS, "max_tokens": 5, **options}
    task = asyncio.create_task(http.post("/v1/completions", json=body))
    request = await mesh.outputs.next_request()
    assert list(request.submit.block_hash_prefixes) == prefix_hashes(hashed, BLOCK_SIZE)
    assert len(request.submit.block_hash_prefixes) == len(hashed) // BLOCK_SIZE
    request.answer("x")
    assert (await task).status_code == 200


async def test_a_text_that_is_cut_by_the_gateway_is_hashed_anew(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    text = "abcdefgh" * 10
    body = {"model": MODEL, "prompt": text, "truncate_prompt_tokens": 2 * BLOCK_SIZE, "max_tokens": 5}
    task = asyncio.create_task(http.post("/v1/completions", json=body))
    request = await mesh.outputs.next_request()
    assert list(request.submit.block_hash_prefixes) == prefix_hashes(text.encode()[-2 * BLOCK_SIZE :], BLOCK_SIZE)
    request.answer("x")
    assert (await task).status_code == 200


async def test_a_long_prompt_is_hashed_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_prompt, "TOKENS_PER_TURN", 4 * BLOCK_SIZE)
    prompts = [TokenizedPrompt(token_ids=range(10 * BLOCK_SIZE)) for _ in range(3)]
    turns, done = 0, asyncio.Event()

    async def count() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    await encoded_prompt.add_hashes(prompts, BLOCK_SIZE, b"salt")
    done.set()
    await counter
    assert turns >= 6
    for prompt in prompts:
        assert list(prompt.block_hash_prefixes) == prefix_hashes(range(10 * BLOCK_SIZE), BLOCK_SIZE, b"salt")


async def test_without_a_block_size_nothing_is_hashed() -> None:
    prompt = TokenizedPrompt(token_ids=range(64))
    await encoded_prompt.add_hashes([prompt], 0, b"")
    assert not prompt.block_hash_prefixes
