"""LoRA adapters named as models, in every API."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tests.services.gateway.kserve.test_kserve_servicer import infer
from tests.services.gateway.test_several_meshes import describe, other_dir, until
from tokenloom.request.adapter_names import adapter_salt
from tokenloom.services.runtime.peers import channels
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

__all__ = ["other_dir"]

PIRATE, JSON = types_pb2.Adapter(name="pirate", digest=b"p" * 32), types_pb2.Adapter(name="json", digest=b"j" * 32)
NAME = f"{MODEL}:pirate"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT,
    "/api/chat": {"messages": CHAT["messages"], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


def having(mesh: FakeMesh, *adapters: types_pb2.Adapter) -> FakeMesh:
    """The mesh, in which the engines have these adapters."""
    mesh.coordinator.adapters = {adapter.name: adapter for adapter in adapters}
    return mesh


async def listed(http: httpx.AsyncClient) -> list[tuple[str, str, str | None]]:
    models = (await http.get("/v1/models")).json()["data"]
    return [(model["id"], model["root"], model["parent"]) for model in models]


async def test_every_api_takes_an_adapter_as_the_model(socket_dir: Path) -> None:
    async with having(FakeMesh(socket_dir), PIRATE).gateway() as mesh, mesh.http() as http:
        await until(http, "ok")
        for path, body in BODIES.items():
            hashes = []
            adapter = (b"p" * 32, NAME)
            names = {MODEL: (b"", MODEL), NAME: adapter, "pirate": adapter}
            names |= {f"{name}:latest": named for name, named in names.items()}
            for name, (digest, answers) in names.items():
                call = asyncio.create_task(http.post(path, json={**body, "model": name}))
                request = await mesh.outputs.next_request()
                request.answer("ahoy")
                response = await call
                assert (response.status_code, response.json()["model"]) == (200, answers), response.text
                prompt = request.submit.prompt
                assert (prompt.adapter, prompt.cache_salt) == (digest, adapter_salt(b"", digest)), path
                hashes.append(list(request.submit.block_hash_prefixes))
            assert hashes[0] != hashes[1] == hashes[2], path
            unknown = await http.post(path, json={**body, "model": f"{MODEL}:jason"})
            assert unknown.status_code == 404
            assert f"model '{MODEL}' has no LoRA adapter 'jason'; GET /v1/models (gRPC: " in unknown.text
        metrics = (await http.get("/metrics")).text
        assert f'tokenloom_adapter_requests_total{{adapter="{NAME}"}} {4.0 * len(BODIES)}' in metrics
        assert f'adapter="{MODEL}"' not in metrics


async def test_a_stream_names_the_adapter_and_so_does_a_clients_key(socket_dir: Path) -> None:
    async with having(FakeMesh(socket_dir), PIRATE).gateway() as mesh, mesh.http() as http:
        await until(http, "ok")
        mesh.outputs.auto = ["ahoy"]
        body = {**CHAT, "model": "pirate", "stream": True, "cache_salt": "mine"}
        assert f'"model":"{NAME}"' in (await http.post("/v1/chat/completions", json=body)).text


async def test_models_are_listed_with_their_adapters(socket_dir: Path) -> None:
    async with having(FakeMesh(socket_dir), PIRATE, JSON).gateway() as mesh, mesh.http() as http:
        await until(http, "ok")
        expected = [(MODEL, MODEL, None)]
        expected += [(f"{prefix}{name}", MODEL, MODEL) for name in ("json", "pirate") for prefix in (f"{MODEL}:", "")]
        assert await listed(http) == expected
        for name in (NAME, "pirate"):
            found = (await http.get(f"/v1/models/{name}")).json()
            assert (found["id"], found["parent"]) == (name, MODEL)
        missing = await http.get("/v1/models/org/model:x")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        tags = (await http.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == [name for name, *_ in expected]
        async with mesh.inference() as stub:
            models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert [(model.name, model.parent) for model in models] == [(n, p or "") for n, _, p in expected]
        await mesh.coordinator.set_engines("engine-0")
        mesh.coordinator.adapters.clear()
        await mesh.coordinator.set_engines("engine-0")
        async with asyncio.timeout(SOON):
            while len(await listed(http)) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_the_grpc_apis_take_an_adapter_too(socket_dir: Path) -> None:
    async with having(FakeMesh(socket_dir), PIRATE).gateway() as mesh, mesh.http() as http:
        await until(http, "ok")
        async with mesh.inference() as stub, channels.open_channel(mesh.grpc_address) as channel:
            call = stub.Generate(inference_pb2.GenerateRequest(model=NAME, text="hi"))
            request = await mesh.outputs.next_request()
            assert request.submit.prompt.adapter == PIRATE.digest
            request.answer("ahoy")
            assert "".join([response.text async for response in call]) == "ahoy"
            kserve = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = infer("hi")
            asked.model_name = "pirate"
            inferring = asyncio.ensure_future(kserve.ModelInfer(asked))
            request = await mesh.outputs.next_request()
            assert request.submit.prompt.adapter == PIRATE.digest
            request.answer("ahoy")
            assert (await inferring).model_name == NAME
            assert (await kserve.ModelReady(grpc_service_pb2.ModelReadyRequest(name=NAME))).ready
            assert not (await kserve.ModelReady(grpc_service_pb2.ModelReadyRequest(name=f"{MODEL}:x"))).ready


async def test_a_session_stays_with_its_adapter(socket_dir: Path) -> None:
    async with having(FakeMesh(socket_dir), PIRATE).gateway() as mesh, mesh.http() as http, mesh.inference() as stub:
        await until(http, "ok")
        mesh.outputs.auto = ["ahoy"]

        async def turns() -> Any:
            yield inference_pb2.GenerateRequest(model=NAME, text="a")
            yield inference_pb2.GenerateRequest(model="pirate", text="b")
            yield inference_pb2.GenerateRequest(model=MODEL, text="c")

        call = stub.GenerateSession(turns())
        texts = "".join([(await call.read()).text for _ in range(4)])
        with pytest.raises(grpc.aio.AioRpcError, match="stays with the model of its first turn"):
            await call.read()
        assert texts == "ahoyahoy"


async def test_several_models_have_adapters_of_their_own(socket_dir: Path, other_dir: Path) -> None:
    first, other = having(FakeMesh(socket_dir), PIRATE, JSON), having(FakeMesh(other_dir), PIRATE)
    first.outputs.auto, other.outputs.auto = ["from a"], ["from b"]
    settings = {"served_model_name": "a", "meshes": describe(other, "b")}
    async with other.servers(), first.gateway(**settings), first.http() as http:
        await until(http, "ok")
        rows = [("a:pirate", "a:pirate"), ("b:pirate", "b:pirate"), ("json", "a:json")]
        for name, answers in rows:
            response = await http.post("/v1/completions", json={"prompt": "hi", "model": name})
            assert response.json()["model"] == answers, response.text
            assert f"from {answers[0]}" in response.text
        wrong = {"b:json": "model 'b' has no LoRA adapter 'json'", "c:json": "model 'c:json' is not served"}
        for name, reason in wrong.items():
            refused = await http.post("/v1/completions", json={"prompt": "hi", "model": name})
            assert (refused.status_code, reason in refused.text) == (404, True), refused.text
        both = await http.post("/v1/completions", json={"prompt": "hi", "model": "pirate"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "model")
        assert "'pirate' is an adapter of several models; send 'a:pirate' or 'b:pirate'" in both.text
        assert [name for name, *_ in await listed(http)] == ["a", "b", "a:json", "json", "a:pirate", "b:pirate"]
        assert (await http.get("/v1/models/b:pirate")).json()["parent"] == "b"
