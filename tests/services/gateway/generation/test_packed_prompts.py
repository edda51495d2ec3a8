"""Long prompts whose ids come packed from the tokenizer are used as others are."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, FakeMesh
from tokenloom.request import packed_ids
from tokenloom.services.gateway.generation import preparation

TEXT = "a day by the river"


@pytest.fixture(autouse=True)
def few_tokens_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 4)


async def submitted(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, Any], *, is_packed: bool = True
) -> tuple[bytes, int]:
    """Return the prompt that an output processor gets, and the number of its hashes."""
    call = asyncio.create_task(http.post(path, json=body))
    request = await mesh.outputs.next_request()
    request.answer("x")
    assert (await call).status_code == 200
    prompt = request.submit.prompt
    assert bool(prompt.token_ids) is not bool(prompt.packed_token_ids) is is_packed
    return bytes(list(packed_ids.ids_of(prompt))), len(request.submit.block_hash_prefixes)


async def test_a_text_and_a_conversation(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert await submitted(mesh, http, "/v1/completions", {"prompt": TEXT}) == (TEXT.encode(), 1)
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    ids, _ = await submitted(mesh, http, "/v1/chat/completions", chat)
    assert TEXT.encode() in ids


async def test_the_end_of_a_text_has_other_hashes(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {"prompt": TEXT, "truncate_prompt_tokens": 5}
    assert await submitted(mesh, http, "/v1/completions", body) == (TEXT.encode()[-5:], 0)


async def test_what_the_context_does_not_hold_is_refused_for_its_length(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "check_sizes", lambda *_: None)  # as if the longest token were not known
    response = await http.post("/v1/completions", json={"prompt": "a" * (LIMITS.max_model_len + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_tokenize_and_count(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": TEXT})).json()
    assert (answer["count"], bytes(answer["tokens"])) == (len(TEXT), TEXT.encode())
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
    counted = (await http.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["input_tokens"] > len(TEXT)


async def test_ids_of_the_client(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    ids = [*TEXT.encode()]
    assert await submitted(mesh, http, "/v1/completions", {"prompt": ids}) == (TEXT.encode(), 1)
    assert await submitted(mesh, http, "/v1/completions", {"prompt": ids, "truncate_prompt_tokens": 5}) == (
        TEXT.encode()[-5:],
        0,
    )
    floats = {"prompt": [*map(float, ids)]}
    assert await submitted(mesh, http, "/v1/completions", floats, is_packed=False) == (TEXT.encode(), 1)
