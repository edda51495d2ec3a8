"""Text in, text out, through all five services: the tokens are those that the prompt's hash chain gives."""

from typing import Any

import httpx

from tests.mesh.harness import MODEL, Mesh


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "return_token_ids": True, "ignore_eos": True, **fields}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def test_completion(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = await complete(http, prompt="Once upon a time", max_tokens=20)
    (choice,) = body["choices"]
    prompt_ids = mesh.encode("Once upon a time")
    assert choice["prompt_token_ids"] == prompt_ids
    assert choice["token_ids"] == mesh.expected(prompt_ids, 20)
    assert choice["text"] == mesh.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 20
    assert body["usage"]["prompt_tokens"] == len(prompt_ids)
