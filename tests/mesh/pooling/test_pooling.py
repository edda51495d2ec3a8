"""Tests vectors, classes and scores of the whole mesh; the hash worker makes them."""

import asyncio
import struct
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from tests.mesh.harness import MODEL, Mesh
from tests.ready_channel import ready_channel
from tokenloom.engine_core.data.core_params import CorePoolingParams, PoolingTask
from tokenloom.engine_core.fake_workers.hash_row import hash_pooled
from tokenloom.services.gateway.pooling.vector_json import numbers
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.records.pooling_input import PoolingInput
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.tenants.tenant import Tenant
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"engines": 2, "output_processors": 2}


def _expected(ids: Sequence[int], task: PoolingTask = PoolingTask.EMBED, **params: Any) -> list[Any]:
    prefix = np.array([[token_id, position] for position, token_id in enumerate(ids)], dtype=np.int32)
    rows: list[Any] = hash_pooled(prefix, CorePoolingParams(task, **params)).tolist()
    return rows


async def _embed(http: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await http.post("/v1/embeddings", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


async def test_vectors_are_those_of_the_engine(mesh: Mesh, http: httpx.AsyncClient) -> None:
    texts = ["A cat sat.", "Two dogs ran away."]
    vectors = [_expected(mesh.encode(text)) for text in texts]
    assert await _embed(http, input=texts) == vectors
    assert await _embed(http, input=[mesh.encode(text) for text in texts]) == vectors
    (packed,) = await _embed(http, input=texts[0], encoding_format="base64", dimensions=3)
    assert list(struct.unpack("<3f", b64decode(packed))) == _expected(mesh.encode(texts[0]), dimensions=3)


async def test_rows_of_tokens_and_classes(mesh: Mesh, http: httpx.AsyncClient) -> None:
    ids = mesh.encode("A cat sat.")
    rows = (await http.post("/pooling", json={"input": [ids]})).json()["data"][0]["data"]
    assert rows == _expected(ids, PoolingTask.TOKEN_EMBED)
    classes = (await http.post("/classify", json={"input": [ids]})).json()["data"][0]
    assert (classes["probs"], classes["num_classes"]) == (_expected(ids, PoolingTask.CLASSIFY), 2)


async def test_documents_are_ranked(mesh: Mesh, http: httpx.AsyncClient) -> None:
    texts = [f"document {index}" for index in range(5)]
    answer = (await http.post("/rerank", json={"query": "which", "documents": texts})).json()
    scores = [_expected(_pair(mesh, "which", text), PoolingTask.SCORE) for text in texts]
    assert [result["relevance_score"] for result in answer["results"]] == sorted(scores, reverse=True)


def _pair(mesh: Mesh, query: str, document: str) -> list[int]:
    ids: list[int] = mesh.tokenizer.encode(query, document).ids
    return ids


async def test_vectors_and_text_share_the_engines(mesh: Mesh, http: httpx.AsyncClient) -> None:
    prompt = mesh.encode("Once upon a time")
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    generation = asyncio.create_task(http.post("/v1/completions", json=body))
    inputs = [[index + 1, 7] for index in range(200)]
    assert await _embed(http, input=inputs) == [_expected(ids) for ids in inputs]
    assert (await generation).json()["choices"][0]["token_ids"] == mesh.expected(prompt, 40)


async def test_calls_over_grpc(mesh: Mesh) -> None:
    assert mesh.gateway.host is not None
    ids = [5, 6, 7]
    inputs = [inference_pb2.PoolInput(token_ids=types_pb2.TokenIds(ids=ids))]
    async with ready_channel(mesh.gateway.host.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Embed(inference_pb2.EmbedRequest(model=MODEL, inputs=inputs, dimensions=4))
        (response,) = [each async for each in call]
        (output,) = response.outputs
        assert (numbers(output.data), list(output.shape)) == (_expected(ids, dimensions=4), [4])
        assert response.usage.prompt_tokens == 3
        pool = inference_pb2.PoolRequest(inputs=inputs, task=types_pb2.POOLING_TASK_TOKEN_EMBED)
        (response,) = [each async for each in stub.Pool(pool)]
        assert list(response.outputs[0].shape) == [3, 8]
        classify = inference_pb2.ClassifyRequest(inputs=inputs)
        (response,) = [each async for each in stub.Classify(classify)]
        assert numbers(response.outputs[0].data) == _expected(ids, PoolingTask.CLASSIFY)
        score = inference_pb2.ScoreRequest(query="which", documents=["a", "b"])
        (response,) = [each async for each in stub.Score(score)]
        expected = [_expected(_pair(mesh, "which", text), PoolingTask.SCORE) for text in "ab"]
        assert [numbers(each.data)[0] for each in response.outputs] == expected


async def test_documents_are_scored_where_the_query_is(mesh: Mesh) -> None:
    assert isinstance(mesh.gateway.service, GatewayService)
    assert mesh.gateway.service._started is not None
    generator = mesh.gateway.service._started[0].first.generator
    query, documents = [3, 4], [[index + 5, index + 6, index + 7] for index in range(40)]
    tenant, params = (
        Tenant(name="t", cache_salt=b""),
        types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_TOKEN_EMBED),
    )
    generate_request = GenerateRequest([query, *documents], "documents", types_pb2.SamplingParams(), tenant=tenant)
    async with generator.pool(PoolingInput(generate_request, params, num_queries=1)) as pooling:
        scores = [numbers(result.data)[0] for result in pooling.results]
    rows = [np.array(_expected(ids, PoolingTask.TOKEN_EMBED)) for ids in (query, *documents)]
    assert scores == pytest.approx([float((rows[0] @ row.T).max(axis=1).sum()) for row in rows[1:]], rel=1e-5)


async def test_a_killed_engine_costs_no_input(mesh: Mesh, http: httpx.AsyncClient) -> None:
    inputs = [[index % 2000, index // 2000, 9] for index in range(2048)]
    call = asyncio.create_task(_embed(http, input=inputs))
    while _num_live(mesh) < 16:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await mesh.engines[0].kill()
    assert not call.done()
    try:
        assert await call == [_expected(ids) for ids in inputs]
    finally:
        await mesh.engines[0].start()


def _num_live(mesh: Mesh) -> float:
    """The requests at all output processors."""
    hosts = [part.host for part in mesh.output_processors if part.host is not None]
    name = "tokenloom_output_processor_requests_live"
    return sum(host.metrics.get_sample_value(name) or 0 for host in hosts)
