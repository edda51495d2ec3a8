"""What one request may ask for is bounded: the tokens of all outputs, each with its log probabilities."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.generation.encoded_prompt import check_copies
from tokenloom.services.gateway.generation.preparation import RequestCost
from tokenloom.v1 import output_processor_pb2, types_pb2

COMPLETIONS = "/v1/completions"


def check(
    num_prompts: int, num_samples: int, most: int, num_prompt_tokens: int = 1, **sampling: Any
) -> list[output_processor_pb2.Submit]:
    params = types_pb2.SamplingParams(**sampling)
    prompt = types_pb2.Prompt(token_ids=range(num_prompt_tokens))
    submits = [output_processor_pb2.Submit(sampling_params=params, prompt=prompt) for _ in range(num_prompts)]
    RequestCost.of(params, LIMITS, (num_prompts, num_samples), most).check(submits, LIMITS)
    return submits


def test_the_product_may_reach_its_limit() -> None:
    check(1, 4, 4 * 10 * 6, max_tokens=10, logprobs=5)
    check(3, 4, 3 * 4 * 10, max_tokens=10)
    check(1, 1, 10 * 3, max_tokens=10, logprobs=0, logprob_token_ids=[1, 2])
    check(2, 1, 2 * 7 * 5, num_prompt_tokens=7, max_tokens=1, prompt_logprobs=5)


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "sampling", "field", "words"),
    [
        (1, 4, {"max_tokens": 10, "logprobs": 5}, "n", "is 4 [*] 10 [*] 6 = 240; .* allows 29 .*: lower n or "
         "max_tokens or logprobs$"),
        (1, 1, {"max_tokens": 30}, "max_tokens", "= 30; .* lower max_tokens$"),
        (3, 1, {"max_tokens": 10}, "max_tokens", "lower prompts or max_tokens$"),
        (1, 1, {"max_tokens": 1, "prompt_logprobs": 30}, "prompt_logprobs", "30 log probabilities of the prompts"),
        (1, 1, {"max_tokens": 1, "logprobs": 2**32 - 1}, "max_tokens", "is 1 [*] 1 [*] 257 = 257; .* lower logprobs$"),
    ],
)  # fmt: skip
def test_a_larger_product_names_what_to_lower(
    num_prompts: int, num_samples: int, sampling: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        check(num_prompts, num_samples, 29, **sampling)
    assert caught.value.field == field


def test_parameters_are_not_copied_for_many_prompts() -> None:
    sampling = types_pb2.SamplingParams(allowed_token_ids=range(100_000, 200_000))
    check_copies(sampling, 100)
    with pytest.raises(InvalidArgument, match="send fewer prompts"):
        check_copies(sampling, 200)


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
