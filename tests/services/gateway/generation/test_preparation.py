"""What one request may ask for is bounded: the tokens of all outputs, each with its log probabilities."""

import asyncio
from pathlib import Path

import httpx

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.request.errors import InvalidArgument

COMPLETIONS = "/v1/completions"


async def test_the_gateway_bounds_it(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """With the default limit: 1,024 outputs of 240 tokens with 20 alternatives are too many, 128 are not."""
    mesh.outputs.auto = ["x"]
    body = {"model": MODEL, "prompt": ["a"] * 8, "n": 128, "max_tokens": 240, "logprobs": 20}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "n"
    assert "prompts * n * max_tokens * (1 + logprobs) is 8 * 128 * 240 * 21 = 5160960" in error["message"]


async def test_a_length_that_is_left_open_is_lowered(socket_dir: Path) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    body = chat | {"n": 4, "logprobs": True, "top_logprobs": 4}
    async with FakeMesh(socket_dir).gateway(max_request_values=4 * 5 * 30) as mesh, mesh.http() as http:
        for fields, max_tokens in ((body, 30), (chat, LIMITS.max_model_len - 32)):
            task = asyncio.create_task(http.post("/v1/chat/completions", json=fields))
            request = await mesh.outputs.next_request()
            assert request.submit.sampling_params.max_tokens == max_tokens
            request.fail(InvalidArgument("enough"))
            assert (await task).status_code == 400
