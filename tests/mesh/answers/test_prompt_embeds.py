"""Embeddings through all five services: the hash worker counts their rows as ids."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.mesh.harness import MODEL, Mesh
from tests.mesh.split import SplitMesh
from tests.ready_channel import ready_channel
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = np.random.default_rng(0).random((20, HIDDEN_SIZE), dtype=np.float32)
FILE = save({"prompt_embeds": ROWS})
TEXT = base64.b64encode(FILE).decode()
IDS = embeds_ids(EmbedsSpan(0, ROWS))


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"engine": {"enable_prompt_embeds": True}}


async def complete(mesh: Mesh, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "return_token_ids": True, "ignore_eos": True, "max_tokens": 10, **fields}
    async with mesh.http() as http:
        return await http.post("/v1/completions", json=body)


async def test_embeddings_alone_and_between_ids(mesh: Mesh) -> None:
    parts = [{"token_ids": [5, 6, 7]}, {"embeds": TEXT}, {"token_ids": [8]}]
    answer = await complete(mesh, prompt_embeds=[TEXT, parts])
    assert answer.status_code == 200, answer.text
    alone, mixed = answer.json()["choices"]
    assert alone["token_ids"] == mesh.expected(IDS, 10)
    assert mixed["token_ids"] == mesh.expected([5, 6, 7, *IDS, 8], 10)
    assert mixed["prompt_token_ids"] == [5, 6, 7, *[0] * 20, 8]
    assert answer.json()["usage"]["prompt_tokens"] == 44
    again = (await complete(mesh, prompt_embeds=parts)).json()
    assert again["choices"][0]["token_ids"] == mixed["token_ids"]


async def test_the_same_over_grpc(mesh: Mesh) -> None:
    parts = [
        inference_pb2.PromptPart(token_ids=types_pb2.TokenIds(ids=[5])),
        inference_pb2.PromptPart(embeds=FILE),
    ]
    request = inference_pb2.GenerateRequest(
        parts=inference_pb2.PromptParts(parts=parts),
        sampling_params=types_pb2.SamplingParams(max_tokens=10),
        ignore_eos=True,
    )
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        token_ids = [token_id async for response in call for token_id in response.token_ids]
    assert token_ids == mesh.expected([5, *IDS], 10)


async def test_different_embeddings_share_the_tokens_before_them(mesh: Mesh) -> None:
    prefix = list(range(40, 80))
    other = base64.b64encode(save({"prompt_embeds": ROWS + 1})).decode()
    for text, ids, cached in ((TEXT, IDS, 0), (other, embeds_ids(EmbedsSpan(0, ROWS + 1)), 32), (TEXT, IDS, 48)):
        answer = (await complete(mesh, prompt_embeds=[{"token_ids": prefix}, {"embeds": text}])).json()
        assert answer["choices"][0]["token_ids"] == mesh.expected([*prefix, *ids], 10)
        details = answer["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"] if details else 0) == cached


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_embeds": "%%%"}, "not base64"),
        ({"prompt_embeds": base64.b64encode(b"PK\x03\x04").decode()}, "torch.save"),
        ({"prompt_embeds": base64.b64encode(save({"a": ROWS[:, :3].copy()})).decode()}, "shape [20, 3]"),
        ({"prompt_embeds": base64.b64encode(save({"a": ROWS * np.inf})).decode()}, "NaN or infinities"),
        ({"prompt_embeds": []}, "must be base64"),
        ({"prompt_embeds": [{"text": "a"}]}, "a part must be"),
        ({"prompt_embeds": TEXT, "prompt": "text"}, "exclude each other"),
        ({"prompt_embeds": TEXT, "echo": True}, "echo is not supported with"),
        ({"prompt_embeds": TEXT, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens is not supported with"),
        ({"prompt_embeds": TEXT, "prompt_logprobs": 1}, "prompt_logprobs is not available with prompt_embeds"),
    ],
)
async def test_bad_embeddings_are_refused_by_name(mesh: Mesh, fields: dict[str, Any], words: str) -> None:
    answer = await complete(mesh, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in fields


async def test_prefill_and_decode_apart(socket_dir: Path) -> None:
    engine = {"enable_prompt_embeds": True}
    other = base64.b64encode(save({"prompt_embeds": ROWS + 1})).decode()
    async with SplitMesh(socket_dir, engine=engine).running() as mesh:
        for text, ids in ((TEXT, IDS), (other, embeds_ids(EmbedsSpan(0, ROWS + 1)))):
            answer = await complete(mesh, prompt_embeds=text)
            assert answer.json()["choices"][0]["token_ids"] == mesh.expected(ids, 10)
        assert mesh.of_role("decode").stats.kv_blocks_received == 4, "none of the first prompt served the second"
        await mesh.check_nothing_is_left()


async def test_engines_that_take_none_say_so(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh:
        answer = await complete(mesh, prompt_embeds=TEXT)
    assert answer.status_code == 400
    assert "--enable-prompt-embeds" in answer.json()["error"]["message"]
