"""Limits of tenants over every entrance of a gateway."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh, FakeRequest
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.peers import channels
from tokenloom.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

SECRET = "s" * 32
A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
METADATA_A, METADATA_B = (tuple(headers.items()) for headers in (A, B))
BODY = {"prompt": "abcd", "max_tokens": 6}
GRAMMAR = {**BODY, "structured_outputs": {"regex": "[0-9]{4}"}}


@asynccontextmanager
async def gateway(directory: Path, limits_of_a: str = "", **settings: Any) -> AsyncIterator[FakeMesh]:
    """A gateway with the tenants a, with these limits, and b, with the gateway's."""
    file = directory / "keys.toml"
    tables = []
    for name, limits in (("a", limits_of_a), ("b", "")):
        digest = hashlib.sha256(f"key-{name}".encode()).hexdigest()
        tables.append(f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{digest}"]\n[tenant.limits]\n{limits}\n')
    file.write_text("".join(tables))
    async with FakeMesh(directory).gateway(api_key_file=file, cache_salt_secret=SECRET, **settings) as mesh:
        yield mesh


async def start(
    mesh: FakeMesh, http: httpx.AsyncClient, key: Mapping[str, str], **body: Any
) -> tuple[Any, FakeRequest]:
    """Send a request; return its task, and the request once it is at the output processor."""
    task = asyncio.create_task(http.post("/v1/completions", json=BODY | body, headers=key))
    return task, await mesh.outputs.next_request()


def check_limited(response: httpx.Response, limit: str, retry_after: str = "1") -> None:
    assert response.status_code == 429, response.text
    assert response.headers["retry-after"] == retry_after
    error = response.json()["error"]
    assert (error["type"], error["code"], error["limit"]) == ("rate_limit_error", "rate_limit_exceeded", limit)
    assert limit in error["message"]


async def metric(http: httpx.AsyncClient, name: str, tenant: str, **labels: str) -> float:
    page = (await http.get("/metrics", headers=A)).text
    wanted = {"tenant": tenant, **labels}
    for line in page.splitlines():
        if line.startswith(f"tokenloom_tenant_{name}{{") and all(f'{k}="{v}"' in line for k, v in wanted.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"{name} of {tenant} is not shown")


async def test_outputs_in_work(socket_dir: Path) -> None:
    async with gateway(socket_dir, "live_outputs = 2") as mesh, mesh.http() as http:
        task, request = await start(mesh, http, A, n=2)
        check_limited(await http.post("/v1/completions", json=BODY, headers=A), "live_outputs")
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        check_limited(await http.post("/v1/chat/completions", json=chat, headers=A), "live_outputs")
        beams = {**BODY, "use_beam_search": True, "n": 2}
        check_limited(await http.post("/v1/completions", json=beams, headers=A), "live_outputs")
        other, of_b = await start(mesh, http, B, n=2)
        never = await http.post("/v1/completions", json=BODY | {"n": 3}, headers=A)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert await metric(http, "live_outputs", "a") == 2
        assert await metric(http, "refused_requests_total", "a", limit="live_outputs") == 4
        for live in (task, other):
            live.cancel()
        for gone in (request, of_b):
            await asyncio.wait_for(gone.cancelled.wait(), SOON)
        mesh.outputs.auto = ["x"]
        assert (await http.post("/v1/completions", json=BODY, headers=A)).status_code == 200


async def test_one_tenant_takes_at_most_half_of_a_gateway_and_leaves_room(socket_dir: Path) -> None:
    async with gateway(socket_dir, max_live_requests=8) as mesh, mesh.http() as http:
        tasks = [(await start(mesh, http, A, n=2))[0] for _ in range(2)]
        check_limited(await http.post("/v1/completions", json=BODY, headers=A), "live_outputs")
        tasks.append((await start(mesh, http, B, n=2))[0])
        full = await http.post("/v1/completions", json=BODY, headers=B)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "resource_exhausted")
        assert await metric(http, "refused_requests_total", "b", limit="max_live_requests") == 1
        for task in tasks:
            task.cancel()


async def test_tokens_per_second(socket_dir: Path) -> None:
    """A request reserves its prompt (4) and its max_tokens (6); what it did not generate returns."""
    async with gateway(socket_dir, "tokens_per_second = 2\ntoken_burst = 20") as mesh, mesh.http() as http:
        first, of_first = await start(mesh, http, A)
        second, of_second = await start(mesh, http, A)
        check_limited(await http.post("/v1/completions", json=BODY, headers=A), "tokens_per_second", "5")
        of_first.answer("x")
        assert (await first).status_code == 200
        of_second.answer("xyzxyz")
        assert (await second).status_code == 200
        assert await metric(http, "tokens_total", "a") == 15
        check_limited(await http.post("/v1/completions", json=BODY, headers=A), "tokens_per_second", "3")
        mesh.outputs.auto = ["x"]
        assert (await http.post("/v1/completions", json=BODY, headers=B)).status_code == 200
        pass_time(3)
        assert (await http.post("/v1/completions", json=BODY, headers=A)).status_code == 200
        never = await http.post("/v1/completions", json=BODY | {"max_tokens": 17}, headers=A)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
        pass_time(10)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        unbounded = await http.post("/v1/chat/completions", json=chat, headers=A)
        assert unbounded.status_code == 200, "it reserves the whole bucket, not the rest of the context"


async def test_a_request_that_is_cancelled_pays_its_prompt_and_what_was_generated(socket_dir: Path) -> None:
    async with gateway(socket_dir, "tokens_per_second = 1") as mesh, mesh.http() as http:
        task, request = await start(mesh, http, A)
        task.cancel()
        await asyncio.wait_for(request.cancelled.wait(), SOON)
        assert await metric(http, "tokens_total", "a") == 4
        refused = await http.post("/v1/completions", json=BODY | {"max_tokens": 600}, headers=A)
        assert refused.status_code == 400
        assert await metric(http, "tokens_total", "a") == 4, "what was never sent costs nothing"


async def test_a_beam_search_pays_for_every_beam(socket_dir: Path) -> None:
    async with gateway(socket_dir, "tokens_per_second = 1\ntoken_burst = 15") as mesh, mesh.http() as http:
        beams = {"prompt": "abcd", "max_tokens": 6, "use_beam_search": True, "n": 2}
        refused = await http.post("/v1/completions", json=beams, headers=A)
        assert refused.status_code == 400
        assert "4 prompt tokens and 12 output tokens" in refused.text


async def test_grammars_that_wait_for_their_first_token(socket_dir: Path) -> None:
    async with gateway(socket_dir, "pending_grammars = 1") as mesh, mesh.http() as http:
        task, request = await start(mesh, http, A, **GRAMMAR)
        again, of_again = await start(mesh, http, A, **GRAMMAR)
        assert await metric(http, "pending_grammars", "a") == 1, "it is compiled once"
        different = GRAMMAR | {"structured_outputs": {"regex": "[a-z]"}}
        check_limited(await http.post("/v1/completions", json=different, headers=A), "pending_grammars")
        assert await metric(http, "live_outputs", "a") == 2
        other, of_b = await start(mesh, http, B, **different)
        request.send("1", [49])
        of_again.answer("1234")
        assert (await again).status_code == 200
        third, of_third = await start(mesh, http, A, **different)
        for each, sent in ((task, request), (other, of_b), (third, of_third)):
            sent.finish()
            assert (await each).status_code == 200
        assert await metric(http, "pending_grammars", "a") == 0


async def test_idle_sessions_of_one_tenant_do_not_refuse_another(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.services.gateway.service.MAX_SESSIONS", 8)
    async with gateway(socket_dir, "sessions = 3") as mesh, mesh.inference() as stub, mesh.http() as http:
        mesh.outputs.auto = ["x"]

        async def open_session(key: Any) -> Any:
            call = stub.GenerateSession(metadata=key)
            await call.write(inference_pb2.GenerateRequest(model=MODEL, text="abc"))
            while not (await call.read()).finish_reason:
                pass
            return call

        idle = [await open_session(METADATA_A) for _ in range(3)]
        for _ in range(20):
            refused = stub.GenerateSession(metadata=METADATA_A)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused.read()
            error = wire_errors.from_rpc(caught.value)
            assert isinstance(error, errors.RateLimitExceeded)
            assert (error.limit, error.retry_after) == ("sessions", 1.0)
        others = [await open_session(METADATA_B) for _ in range(2)]
        assert await metric(http, "sessions", "a") == 3
        assert await metric(http, "refused_requests_total", "a", limit="sessions") == 20
        for call in (*idle, *others):
            call.cancel()


async def test_grpc_and_kserve_report_the_limit(socket_dir: Path) -> None:
    async with gateway(socket_dir, "live_outputs = 1") as mesh, mesh.http() as http:
        task, _ = await start(mesh, http, A)
        async with channels.open_channel(mesh.grpc_address) as channel:
            inference = inference_pb2_grpc.InferenceStub(channel)
            kserve = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
            text = inference_pb2.GenerateRequest(model=MODEL, text="abc")
            infer = _infer("abc")
            with pytest.raises(grpc.aio.AioRpcError) as generated:
                _ = [response async for response in inference.Generate(text, metadata=METADATA_A)]
            with pytest.raises(grpc.aio.AioRpcError) as inferred:
                await kserve.ModelInfer(infer, metadata=METADATA_A)
            for caught in (generated, inferred):
                error = wire_errors.from_rpc(caught.value)
                assert isinstance(error, errors.RateLimitExceeded)
                assert (error.limit, error.retry_after) == ("live_outputs", 1.0)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            (streamed,) = [r async for r in kserve.ModelStreamInfer(iter([infer]), metadata=METADATA_A)]
            assert "live_outputs" in streamed.error_message
            mesh.outputs.auto = ["x"]
            assert (await kserve.ModelInfer(infer, metadata=METADATA_B)).outputs
        task.cancel()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_bytes_of_bodies_that_have_not_arrived(socket_dir: Path, path: str) -> None:
    async with gateway(socket_dir, "body_bytes = 1000") as mesh, mesh.http() as http:
        host, _, port = mesh.http_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"
        writer.write(head % path.encode() + b"Authorization: Bearer key-a\r\n\r\n{")
        async with asyncio.timeout(SOON):
            while await metric(http, "body_bytes", "a") < 900:
                pass
        mesh.outputs.auto = ["x"]
        prompt = {"prompt": "a" * 150}
        check_limited(await http.post("/v1/completions", json=prompt, headers=A), "body_bytes")
        check_limited(await http.post("/tokenize", json=prompt, headers=A), "body_bytes")
        assert (await http.post("/v1/completions", json=prompt, headers=B)).status_code == 200
        never = await http.post("/tokenize", json={"prompt": "a" * 1000}, headers=A)
        assert never.status_code == 413
        writer.close()
        async with asyncio.timeout(SOON):
            while await metric(http, "body_bytes", "a"):
                pass
        assert (await http.post("/v1/completions", json=prompt, headers=A)).status_code == 200


async def test_messages_of_the_grpc_api_count_as_bytes(socket_dir: Path) -> None:
    async with gateway(socket_dir, "body_bytes = 500") as mesh, mesh.inference() as stub, mesh.http() as http:
        long = inference_pb2.GenerateRequest(model=MODEL, text="x" * 400)
        live = stub.Generate(long, metadata=METADATA_A)
        request = await mesh.outputs.next_request()
        assert await metric(http, "body_bytes", "a") == long.ByteSize()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in stub.Generate(long, metadata=METADATA_A)]
        error = wire_errors.from_rpc(caught.value)
        assert isinstance(error, errors.RateLimitExceeded)
        assert error.limit == "body_bytes"
        request.answer("x")
        assert [r.text async for r in live if r.text] == ["x"]
        assert await metric(http, "body_bytes", "a") == 0


async def test_without_keys_only_the_gateways_limit_applies(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(max_live_requests=4) as mesh, mesh.http() as http:
        tasks = [(await start(mesh, http, {}, n=2))[0] for _ in range(2)]
        assert (await http.post("/v1/completions", json=BODY)).status_code == 503
        assert await metric(http, "live_outputs", "") == 4
        for task in tasks:
            task.cancel()


def _infer(text: str) -> grpc_service_pb2.ModelInferRequest:
    tensor = grpc_service_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    return grpc_service_pb2.ModelInferRequest(model_name=MODEL, inputs=[tensor])
