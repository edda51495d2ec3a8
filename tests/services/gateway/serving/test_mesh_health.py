"""What /health, /v1/models, /version and /metrics tell."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.loop_clock import pass_time
from tests.services.gateway.fake_encoders import with_encoders
from tests.services.gateway.fakes import BLOCK_SIZE, LIMITS, MODEL, SOON, FakeMesh, FakeRequest
from tests.services.gateway.openai.ear import listening
from tokenloom.process.fall_backs import KINDS
from tokenloom.services.gateway.mesh.mesh_view import LOST_SECONDS
from tokenloom.services.runtime.host.health import LIVENESS, MEDIA, READINESS
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import coordinator_pb2, inference_pb2, types_pb2


async def until_missing(http: httpx.AsyncClient, *parts: str) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/health")).json().get("missing", []) != list(parts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_status(http: httpx.AsyncClient, status: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (health := (await http.get("/health")).json())["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    found: dict[str, Any] = health
    return found


async def grpc_health(mesh: FakeMesh, name: str) -> bool:
    async with open_channel(mesh.grpc_address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_grpc_health(mesh: FakeMesh, *, serving: bool) -> None:
    async with asyncio.timeout(30):
        while await grpc_health(mesh, "") != serving:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_media(mesh: FakeMesh, *, answered: bool) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # the name is not known yet
                if await grpc_health(mesh, MEDIA) == answered:
                    return
            await asyncio.sleep(0.01)


def ok(count: int = 1) -> dict[str, object]:
    return {"state": "ok", "serving": count, "known": count}


async def test_fall_backs_of_engines_degrade_the_mesh_and_are_named(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await until_status(http, "ok")
    mesh.coordinator.report.fall_backs.add(kind="no_pair", detail="its KV layout is x")
    await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_SERVING)
    health = await until_status(http, "degraded")
    assert health["fall_backs"] == [{"kind": "no_pair", "meaning": KINDS["no_pair"]}]
    assert "degraded" not in health
    (engine,) = (await http.get("/server_info")).json()["engines"]
    assert (engine["state"], engine["fall_backs"]) == ("serving", {"no_pair": "its KV layout is x"})
    del mesh.coordinator.report.fall_backs[:]
    mesh.coordinator.report.fall_backs.add(kind="other_weights", detail="weights is 1")
    await mesh.coordinator.set_engines("engine-0", "engine-1")

    async def states() -> set[str]:
        return {each["state"] for each in (await http.get("/server_info")).json()["engines"]}

    async with asyncio.timeout(30):
        while await states() != {"aside"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_gateway_shows_its_own_fall_backs(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await until_status(http, "ok")
    await mesh.coordinator.set_away(True)
    health = await until_status(http, "degraded")
    assert [each["kind"] for each in health["fall_backs"]] == ["old_view"]
    assert "unix:" not in str(health), "everybody may ask"
    page = (await http.get("/metrics")).text
    assert 'tokenloom_fall_backs_total{kind="old_view"} 1.0' in page
    assert 'tokenloom_fall_back_active{kind="old_view",subject="unix:' in page
    await mesh.coordinator.set_away(False)
    await until_status(http, "ok")


async def test_health_is_200_without_a_coordinator_because_requests_are_answered(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    others = {"gateway": ok(), "tokenizer": ok(2), "output_processor": ok(), "engine": ok()}
    assert (await until_status(http, "ok"))["parts"] == {**others, "coordinator": ok()}
    await mesh.coordinator.set_away(True)
    health = await until_status(http, "degraded")
    assert health["parts"] == {**others, "coordinator": {"state": "missing", "serving": 0, "known": 1}}
    assert (health["degraded"], health.get("missing")) == (["coordinator"], None)
    assert (await http.get("/health")).status_code == 200
    mesh.outputs.auto = ["x"]
    assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert 'tokenloom_part_missing{model_name="fake",part="coordinator"} 1.0' in (await http.get("/metrics")).text
    assert await grpc_health(mesh, "")
    await mesh.coordinator.set_away(False)
    await until_status(http, "ok")


async def test_health_counts_an_engine_that_was_lost_until_it_returns(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await mesh.coordinator.set_engines("engine-0", "engine-1")
    while (await until_status(http, "ok"))["parts"]["engine"] != ok(2):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await mesh.coordinator.set_engines("engine-0")
    health = await until_status(http, "degraded")
    assert health["degraded"] == ["engine"]
    assert health["parts"]["engine"] == {"state": "degraded", "serving": 1, "known": 2}
    assert (await http.get("/health")).status_code == 200
    await mesh.coordinator.set_engines("engine-0", "engine-1")
    await until_status(http, "ok")
    await mesh.coordinator.set_engines("engine-0")
    await until_status(http, "degraded")
    pass_time(LOST_SECONDS)
    async with mesh.http() as later:  # the idle connections ended with the time
        assert (await until_status(later, "ok"))["parts"]["engine"] == ok(), "it does not come back"


async def test_grpc_health_follows_the_mesh_and_readiness_does_not(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert await grpc_health(mesh, "")
    await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_DRAINING)
    await until_missing(http, "engine")
    await until_grpc_health(mesh, serving=False)
    assert not await grpc_health(mesh, "tokenloom.v1.Inference")
    assert [await grpc_health(mesh, name) for name in (READINESS, LIVENESS)] == [True, True]
    await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_SERVING)
    await until_grpc_health(mesh, serving=True)


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


def pool(request: FakeRequest) -> None:
    request.pool([0.5])
    request.finish()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/score", {"queries": "a", "documents": ["b"]}),
    ],
)
async def test_a_request_before_the_first_engine_waits_for_it(
    socket_dir: Path, path: str, fields: dict[str, object]
) -> None:
    fake, done = FakeMesh(socket_dir), asyncio.Event()
    fake.coordinator.engines = []
    fake.coordinator.limits = types_pb2.ModelLimits(
        max_model_len=512,
        vocab_size=256,
        pooling_tasks=[types_pb2.POOLING_TASK_EMBED, types_pb2.POOLING_TASK_SCORE],
    )
    fake.outputs.auto, fake.outputs.pool = ["x"], pool

    async def run() -> None:
        async with fake.gateway():
            await done.wait()

    running = asyncio.create_task(run())
    async with asyncio.timeout(SOON):
        while fake.service is None or not fake.http_address:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with fake.http() as http:
            await until_missing(http, "engine")
            waiting = asyncio.create_task(http.post(path, json={"model": MODEL, **fields}))
            await until_missing(http, "engine")
            assert not waiting.done()
            await fake.coordinator.set_engines("engine-0")
            await until_missing(http)
            assert (await waiting).status_code == 200
        done.set()
        await running


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
    async with FakeMesh(socket_dir).gateway(served_model_name="mine,also/mine") as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        for name in ("mine", "also/mine"):
            response = await http.post("/v1/completions", json={"model": name, "prompt": "a"})
            assert response.json()["model"] == "mine"
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["mine", "also/mine"]
        assert 'model_name="mine"' in (await http.get("/metrics")).text
        async with mesh.inference() as stub:
            models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [model.name for model in models] == ["mine", "also/mine"]
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
        f'tokenloom_gateway_held_requests{{model_name="{MODEL}"}} 0.0',
        f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",model_name="{MODEL}",num_gpu_blocks="64"}} 1.0',
        f'tokenloom_engine_requests_running{{engine="engine-0",model_name="{MODEL}"}} 3.0',
        f'tokenloom_engine_requests_waiting{{engine="engine-0",model_name="{MODEL}"}} 2.0',
        f'tokenloom_engine_kv_cache_usage_ratio{{engine="engine-0",model_name="{MODEL}"}} 0.25',
        f'tokenloom_placement_rule{{model_name="{MODEL}",rule="score"}} 1.0',
        f'tokenloom_placement_score{{engine="engine-0",model_name="{MODEL}"}} 11.0',
        f'tokenloom_part_missing{{model_name="{MODEL}",part="engine"}} 0.0',
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


async def test_a_mesh_whose_model_reads_images_says_that_encoders_are_missing(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["x"]
    async with with_encoders(mesh, 2) as encoders, mesh.gateway(), mesh.http() as http:
        assert (await until_status(http, "ok"))["parts"]["encoder"] == ok(2)
        await until_media(mesh, answered=True)

        await mesh.coordinator.set_encoders(**{"encoder-1": mesh.address("encoder-1")})
        health = await until_status(http, "degraded")
        assert health["parts"]["encoder"] == {"state": "degraded", "serving": 1, "known": 2}
        assert await grpc_health(mesh, MEDIA)

        await mesh.coordinator.set_encoders()
        await until_media(mesh, answered=False)
        health = (await http.get("/health")).json()
        assert health["parts"]["encoder"] == {"state": "missing", "serving": 0, "known": 2}
        assert (health["degraded"], health.get("missing")) == (["encoder"], None)
        assert 'tokenloom_part_missing{model_name="fake",part="encoder"} 1.0' in (await http.get("/metrics")).text
        assert await grpc_health(mesh, "")
        assert await grpc_health(mesh, READINESS)
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200

        names = [f"encoder-{index}" for index in range(len(encoders))]
        await mesh.coordinator.set_encoders(**{name: mesh.address(name) for name in names})
        await until_status(http, "ok")
        await until_media(mesh, answered=True)


async def test_a_model_that_transcribes_answers_nothing_without_an_encoder(socket_dir: Path) -> None:
    async with listening(socket_dir) as ear:
        assert (await until_status(ear.http, "ok"))["parts"]["encoder"] == ok(2)
        await ear.mesh.coordinator.set_encoders()
        await until_missing(ear.http, "encoder")
        assert (await ear.http.get("/health")).status_code == 503
        await until_grpc_health(ear.mesh, serving=False)


async def test_encoders_that_drain_are_not_missing(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_encoders(mesh, 2), mesh.gateway(), mesh.http() as http:
        await mesh.coordinator.drain_encoder("encoder-0")
        async with asyncio.timeout(30):
            while (health := (await http.get("/health")).json())["parts"]["encoder"]["known"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (health["status"], health["parts"]["encoder"]) == ("ok", ok())


async def test_a_mesh_for_text_has_no_encoders(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert "encoder" not in (await until_status(http, "ok"))["parts"]
    async with open_channel(mesh.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=MEDIA))
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND
