"""An output processor of an older release does not read packed prompts."""

import asyncio

import httpx
import pytest

from tests.services.gateway.fakes import FakeMesh
from tokenloom.request import packed_ids
from tokenloom.services.runtime.peers import hello


@pytest.fixture(autouse=True)
def is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "PACKED_IDS", "another feature")  # as its hello has it
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 4)


async def test_it_gets_lists(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    for prompt in ([97, 98, 99, 100, 101, 102], "abcdef"):
        body = {"prompt": prompt, "return_token_ids": True}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await mesh.outputs.next_request()
        assert (list(request.submit.prompt.token_ids), request.submit.prompt.packed_token_ids) == ([*b"abcdef"], b"")
        request.answer("x")
        assert (await call).json()["choices"][0]["prompt_token_ids"] == [*b"abcdef"]
