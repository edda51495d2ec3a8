"""What /health, /v1/models, /version and /metrics tell."""

import asyncio
from pathlib import Path

import httpx

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.v1 import coordinator_pb2, inference_pb2


async def until_missing(http: httpx.AsyncClient, *parts: str) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/health")).json().get("missing", []) != list(parts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_health_names_the_missing_parts(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.head("/health")).status_code == 200
    await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_DRAINING)
    await until_missing(http, "engine")
    response = await http.get("/ping")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_SERVING)
    await until_missing(http)


async def test_models(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["id"] == MODEL
    assert model["max_model_len"] == LIMITS.max_model_len
    assert (await http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    async with mesh.inference() as stub:
        listed = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(each.name, each.max_model_len) for each in listed.models] == [(MODEL, LIMITS.max_model_len)]


async def test_another_model_is_not_found(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/models/another")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_served_model_name(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(served_model_name="mine") as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        response = await http.post("/v1/completions", json={"model": "mine", "prompt": "a"})
        assert response.json()["model"] == "mine"
        assert (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 404


async def test_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json()["version"]


async def test_metrics_of_requests_and_engines(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["abc"]
    await http.post("/v1/completions", json={"prompt": "four"})
    text = (await http.get("/metrics")).text
    for line in (
        f'vllm:num_requests_running{{model_name="{MODEL}"}} 3.0',
        f'vllm:num_requests_waiting{{model_name="{MODEL}"}} 2.0',
        f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.25',
        f'tokenloom_engine_requests_running{{engine="engine-0",model_name="{MODEL}"}} 3.0',
        f'tokenloom_engine_requests_waiting{{engine="engine-0",model_name="{MODEL}"}} 2.0',
        f'tokenloom_engine_kv_cache_usage_ratio{{engine="engine-0",model_name="{MODEL}"}} 0.25',
        'tokenloom_part_missing{part="engine"} 0.0',
        "tokenloom_serving 1.0",
        f'vllm:prompt_tokens_total{{model_name="{MODEL}"}} 4.0',
        f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 3.0',
        f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0',
        f'vllm:time_to_first_token_seconds_count{{model_name="{MODEL}"}} 1.0',
    ):
        assert line in text
    assert (await http.head("/metrics")).status_code == 200


async def test_load(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert (await http.get("/load")).json() == {"server_load": 0}
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "four", "n": 2}))
    async with asyncio.timeout(30):
        while (await http.get("/load")).json() != {"server_load": 2}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking])
