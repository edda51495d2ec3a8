"""The demo model with its adapters: prefill on one engine, decode on another, several adapters at the same time."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.mesh.harness import MODEL
from tests.mesh.split import SplitMesh
from tokenloom.model_files.model_path import DEMO_ADAPTERS

MODULES = tuple(f"{name}={DEMO_ADAPTERS / name}" for name in ("json", "pirate"))
ENGINE = {"worker": "model", "enable_lora": True, "max_loras": 2, "lora_modules": MODULES}
NAMES = (MODEL, f"{MODEL}:json", "pirate")
ADMIN = {"Authorization": "Bearer admin"}
QUESTION = "What is a KV block, and how does a request use the blocks of its block table while it runs?"


async def ask(http: httpx.AsyncClient, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    response = await http.post("/v1/chat/completions", json={**body, "return_timeline": True})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_adapters_answer_in_their_own_way_on_pairs_of_engines(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, engine=ENGINE, gateway={"admin_api_key": "admin"})
    async with mesh.running(), mesh.http() as http:
        together = await asyncio.gather(*(ask(http, name) for name in NAMES))
        assert [answer["model"] for answer in together] == [MODEL, f"{MODEL}:json", f"{MODEL}:pirate"]
        texts = [answer["choices"][0]["message"]["content"] for answer in together]
        assert len(set(texts)) == 3, texts
        assert texts[1].lstrip().startswith("{"), texts
        for answer in together:
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "of another adapter"
            timeline = answer["timeline"]
            assert timeline["prefill_engine"] != timeline["decode_engine"]
        for name, text in zip(NAMES, texts, strict=True):
            again = await ask(http, name)
            assert again["choices"][0]["message"]["content"] == text
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"}, headers=ADMIN)
        assert unloaded.status_code == 200, unloaded.text
        gone = await http.post("/v1/completions", json={"model": "pirate", "prompt": "a"})
        assert gone.json()["error"]["code"] == "model_not_found"
        await mesh.check_nothing_is_left()
