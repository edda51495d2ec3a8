"""The gateway describes itself: version, load, engines and its API."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.services.gateway.openapi.document import EXAMPLES

SCORING = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
POOLING = {"/v1/embeddings", "/classify", "/pooling", "/api/embed", "/api/embeddings", *SCORING}
"""Their answers are checked with a model that pools: ``tests/services/gateway/pooling/test_described.py``."""
HEARING = {"/v1/audio/transcriptions", "/v1/audio/translations"}
"""Refused before a body is read, as this model reads text. Their answers are checked with one that hears:
``tests/services/gateway/openai/test_transcriptions.py``."""
GETS = ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ping", "/version", "/load", "/server_info", "/model_info")


async def test_get_and_head(http: httpx.AsyncClient) -> None:
    for path in (*GETS, "/metrics", "/docs", "/openapi.json"):
        got, head = await http.get(path), await http.head(path)
        assert (got.status_code, head.status_code) == (200, 200), path
        assert (head.content, head.headers["content-type"]) == (b"", got.headers["content-type"])


async def test_no_page_shows_the_document_in_a_frame(http: httpx.AsyncClient) -> None:
    assert "frame-ancestors 'none'" in (await http.get("/docs")).headers["content-security-policy"]


async def test_load_counts_live_outputs(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert (await http.get("/load")).json() == {"server_load": 0}
    task = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}))
    requests_ = [await mesh.outputs.next_request() for _ in range(2)]
    assert (await http.get("/load")).json() == {"server_load": 2}
    for request in requests_:
        request.answer("x")
    assert (await task).status_code == 200
    assert (await http.get("/load")).json() == {"server_load": 0}


async def test_server_info_lists_engines_without_addresses(http: httpx.AsyncClient) -> None:
    info = (await http.get("/server_info")).json()
    assert (info["model"], info["max_model_len"]) == (MODEL, LIMITS.max_model_len)
    (engine,) = info["engines"]
    assert engine == {
        "engine_id": "engine-0",
        "role": "unspecified",
        "state": "serving",
        "running": 3,
        "waiting": 2,
        "kv_cache_usage": 0.25,
        "num_kv_blocks": 64,
        "plugins": [],
    }


async def test_a_wrong_method_gets_the_allowed_ones(http: httpx.AsyncClient) -> None:
    response = await http.delete("/ping")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")


async def test_description_and_page_need_no_key(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("k",)) as mesh, mesh.http() as http:
        api = (await http.get("/openapi.json")).json()
        assert api["openapi"] == "3.1.0"
        page = (await http.get("/docs")).text
        assert "openapi.json" in page
        assert "https://" not in page, "it asks nobody else"
        assert "http://" not in page


async def test_every_described_path_answers_and_every_field_is_described(http: httpx.AsyncClient) -> None:
    api = (await http.get("/openapi.json")).json()
    for path, methods in api["paths"].items():
        for method in methods:
            response = await http.request(method, path.replace("{model}", MODEL))
            # 415: it wants a body; Ollama's routes read any kind of it.
            wanted = (200, 400 if path.startswith("/api/") or path in HEARING else 415)
            if "{id}" in path:
                wanted = (404, 415 if method == "post" else 404)
            assert response.status_code in wanted, (method, path)
    for name, schema in api["components"]["schemas"].items():
        assert schema["description"], name
        for field, about in schema["properties"].items():
            assert about.get("description"), (name, field)


async def test_answers_are_as_described(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    import jsonschema

    mesh.outputs.auto = ["Hi"]
    api = (await http.get("/openapi.json")).json()
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        "/v1/completions": {"prompt": "hi", "max_tokens": 5},
        "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        "/v1/completions/render": {"prompt": ["hi", "you"], "max_tokens": 5, "logprobs": 1, "stop": ["a"]},
        "/v1/chat/completions/derender": EXAMPLES["/v1/chat/completions/derender"],
        "/v1/completions/derender": EXAMPLES["/v1/completions/derender"],
        "/inference/v1/generate": {"token_ids": [104, 105], "sampling_params": {"max_tokens": 5}},
        "/v1/responses": {"input": "hi"},
        "/v1/responses/compact": {"input": "hi"},
        "/v1/conversations": {},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [104, 105]},
        **{
            path: {**EXAMPLES[path], "model": MODEL}
            for path in ("/api/chat", "/api/generate", "/api/show", "/api/pull")
        },
    }
    for path, methods in api["paths"].items():
        for method, about in methods.items():
            content = about["responses"]["200"]["content"]
            if "application/json" not in content or "{id}" in path or path in POOLING | HEARING:
                continue
            response = await http.request(method, path.replace("{model}", MODEL), json=bodies.get(path))
            assert response.status_code == 200, (path, response.text)
            schema = {**content["application/json"]["schema"], "components": api["components"]}
            jsonschema.validate(response.json(), schema)
