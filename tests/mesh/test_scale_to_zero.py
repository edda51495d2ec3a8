"""A mesh without engines: its gateway is ready, holds requests and shows how many; the next engine answers them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.services.runtime.host.health import READINESS
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tokenloom.v1.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc

HELD, MISSING = "tokenloom_gateway_held_requests", "tokenloom_part_missing"
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": [1, 2, 3],
    "max_tokens": 5,
    "ignore_eos": True,
    "return_token_ids": True,
}
_SERVING = health_pb2.HealthCheckResponse.SERVING


def values(page: str, name: str, **labels: str) -> Iterator[float]:
    """Yield the samples of a metric that have these labels."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample.value


async def until_held(http: httpx.AsyncClient, number: int) -> None:
    async with asyncio.timeout(SOON):
        while list(values((await http.get("/metrics")).text, HELD, model_name=MODEL)) != [number]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_no_engine(http: httpx.AsyncClient) -> None:
    """Return when the gateway knows that no engine serves."""
    async with asyncio.timeout(SOON):
        while (await http.get("/health")).json()["parts"]["engine"]["serving"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def readiness(mesh: Mesh) -> int:
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=READINESS))
        return int((await call).status)


async def generate(mesh: Mesh) -> list[int]:
    """Read an answer over gRPC."""
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        token_ids=types_pb2.TokenIds(ids=[1, 2, 3]),
        sampling_params=types_pb2.SamplingParams(max_tokens=5),
        ignore_eos=True,
    )
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        return [token for response in [each async for each in call] for token in response.token_ids]


async def answered(mesh: Mesh, *calls: "asyncio.Task[httpx.Response]") -> None:
    for response in await asyncio.gather(*calls):
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == mesh.expected([1, 2, 3], 5)


async def test_requests_are_held_until_an_engine_comes_again_and_again(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=0, gateway={"ready_without_engines": True})
    async with asyncio.timeout(4 * SOON), mesh.running(), mesh.http() as http:
        assert await readiness(mesh) == _SERVING
        health = await http.get("/health")
        assert (health.status_code, health.json()["parts"]["engine"]["state"]) == (200, "missing")
        page = (await http.get("/metrics")).text
        assert list(values(page, MISSING, part="engine")) == [0.0]
        engine = mesh.new_engine(0)
        for _ in range(2):  # the first engine of all, and one after the last engine had gone
            await until_held(http, 0)
            calls = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(2)]
            await until_held(http, 2)
            assert not any(call.done() for call in calls)
            await engine.start()
            await answered(mesh, *calls)
            await until_held(http, 0)
            await engine.stop()
            await until_no_engine(http)
        page = (await http.get("/metrics")).text
        assert list(values(page, "vllm:request_success_total", finished_reason="length")) == [4.0]


async def test_a_stream_begins_while_its_request_waits_for_an_engine(socket_dir: Path) -> None:
    """Proxies end connections on which nothing comes, sooner than an engine may start."""
    mesh = Mesh(socket_dir, gateway={"ready_without_engines": True, "stream_head_after": 0.05})
    async with asyncio.timeout(4 * SOON), mesh.running(), mesh.http() as http:
        (engine,) = mesh.engines
        await engine.stop()
        await until_no_engine(http)
        async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
            await until_held(http, 1)
            await engine.start()
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
        assert [token for choice in choices for token in choice["token_ids"]] == mesh.expected([1, 2, 3], 5)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_stream_begins_before_its_gateway_knows_an_engine(socket_dir: Path, is_late: bool) -> None:
    """``is_late``: its time is over before an engine comes, and the stream that has begun ends with an error."""
    settings = {"ready_without_engines": True, "stream_head_after": 0.05, "request_timeout": 3.0 if is_late else 600.0}
    mesh = Mesh(socket_dir, engines=0, gateway=settings)
    async with asyncio.timeout(4 * SOON), mesh.running(), mesh.http() as http:
        async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
            await until_held(http, 1)
            engine = mesh.new_engine(0)
            if not is_late:
                await engine.start()
            lines = [line async for line in response.aiter_lines()]
        assert ": keep-alive" in lines
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        if is_late:
            assert "took longer than 3 s" in events[-1]["error"]["message"]
        else:
            choices = [choice for event in events for choice in event["choices"]]
            assert [token for each in choices for token in each["token_ids"]] == mesh.expected([1, 2, 3], 5)
            await engine.stop()
        await until_held(http, 0)


async def test_a_call_over_grpc_and_one_that_leaves_are_counted_while_they_wait(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=0, gateway={"ready_without_engines": True})
    async with asyncio.timeout(4 * SOON), mesh.running(), mesh.http() as http:
        call = asyncio.create_task(generate(mesh))
        leaving = asyncio.create_task(http.post("/v1/completions", json={**BODY, "n": 2}))
        await until_held(http, 3)
        leaving.cancel()
        await until_held(http, 1)
        early = asyncio.create_task(http.post("/v1/embeddings", json={"model": MODEL, "input": "a"}))
        await until_held(http, 2)  # what it may ask for is not known yet
        rendered = asyncio.create_task(http.post("/v1/completions/render", json=BODY))
        await until_held(http, 3)
        engine = mesh.new_engine(0)
        await engine.start()
        assert await call == mesh.expected([1, 2, 3], 5)
        assert (await early).status_code == 200
        assert (await rendered).status_code == 200
        await until_held(http, 0)
        await engine.stop()


async def test_a_caller_ends_a_request_that_waits_for_an_engine(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=0, gateway={"ready_without_engines": True})
    async with asyncio.timeout(4 * SOON), mesh.running(), mesh.http() as http:
        async with ready_channel(mesh.gateway.settings.listen) as channel:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            tokens = vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3])
            calls = [
                stub.Generate(vllm_engine_pb2.GenerateRequest(request_id=name, tokenized=tokens)) for name in ("a", "b")
            ]
            reading = [asyncio.create_task(anext(aiter(call))) for call in calls]
            await until_held(http, 2)
            await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["a", "a", "unknown"]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reading[0]
            assert caught.value.code() == grpc.StatusCode.ABORTED
            await until_held(http, 1)
            calls[1].cancel()
            await asyncio.wait(reading)
        await until_held(http, 0)


async def test_a_gateway_is_not_ready_without_engines_by_default(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=0)
    others = [mesh.coordinator, *mesh.tokenizers, *mesh.output_processors]
    await asyncio.gather(*(part.start() for part in others))
    start = asyncio.create_task(mesh.gateway.start())
    try:
        async with asyncio.timeout(SOON):
            while not _listens(mesh):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            async with mesh.http() as http:
                assert (await http.get("/health")).status_code == 503
                page = (await http.get("/metrics")).text
                assert list(values(page, MISSING, part="engine")) == [1.0]
        assert not start.done()
        assert await readiness(mesh) == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await mesh.gateway.kill()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await asyncio.gather(*(part.stop() for part in others))


def _listens(mesh: Mesh) -> bool:
    return bool(getattr(mesh.gateway.service, "http_address", ""))
