"""The mesh gives the tokens of transformers, and draws those of the offline ``LLM``."""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch

from tests.parity.identical import assert_identical
from tests.parity.reference import Reference, demo_reference
from tokenloom import LLM, SamplingParams

SAMPLING = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "presence_penalty": 0.3}


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    return demo_reference()


@pytest.fixture(scope="module")
def mesh(serve: Any) -> Any:
    return serve("--dtype", "float32")


def complete(url: str, prompts: Sequence[list[int]], max_tokens: Sequence[int], **params: Any) -> list[list[int]]:
    """All prompts at once, each a request of its own."""

    async def one(client: openai.AsyncOpenAI, prompt: list[int], limit: int) -> list[int]:
        answer = await client.completions.create(
            model="tokenloom-demo", prompt=prompt, max_tokens=limit, extra_body={"return_token_ids": True}, **params
        )
        return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]

    async def all_of_them() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, *pair) for pair in zip(prompts, max_tokens, strict=True)))

    return asyncio.run(all_of_them())


def test_greedy_tokens_are_those_of_transformers(mesh: Any, reference: Reference) -> None:
    assert_identical(reference.cases, lambda prompts, limits: complete(mesh.url, prompts, limits, temperature=0))


def test_drawn_tokens_are_those_of_the_offline_llm(mesh: Any, reference: Reference) -> None:
    prompts = [case.prompt for case in reference.cases]
    llm = LLM(reference.path, dtype="float32", max_model_len=1024)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=16, **SAMPLING), use_tqdm=False)
    assert complete(mesh.url, prompts, [16] * len(prompts), **SAMPLING) == [
        list(o.outputs[0].token_ids) for o in outputs
    ]
