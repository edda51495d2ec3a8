"""Who leaves, or has no time left, holds nothing any longer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

LONG: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}
"""At SLOW's steps more work than SOON: an engine that is idle before that has dropped it."""
SLOW = {"hash_step_seconds": 0.2}


@pytest.fixture
async def slow(socket_dir: Path) -> AsyncIterator[Mesh]:
    settings = {"request_timeout": SOON}
    async with Mesh(socket_dir, engine=SLOW, gateway=settings).running() as mesh:
        yield mesh


async def test_client_that_hangs_up_mid_stream(slow: Mesh) -> None:
    async with slow.http() as http, http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.aiter_lines()  # kept: httpx hangs up when it is collected
        assert (await anext(lines)).startswith("data:")
        await slow.until_running()
    await slow.until_idle()


async def test_client_that_hangs_up_before_the_answer(slow: Mesh) -> None:
    async with slow.http() as http:
        request = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await slow.until_running()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await slow.until_idle()


async def test_cancelled_call(slow: Mesh) -> None:
    params = types_pb2.SamplingParams(max_tokens=200)
    request = inference_pb2.GenerateRequest(model=MODEL, text="a", sampling_params=params, ignore_eos=True)
    async with ready_channel(slow.gateway.settings.listen) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        await call.read()
        call.cancel()
        await slow.until_idle()


async def test_calls_deadline(slow: Mesh) -> None:
    params = types_pb2.SamplingParams(max_tokens=200)
    request = inference_pb2.GenerateRequest(model=MODEL, text="a", sampling_params=params, ignore_eos=True)
    async with ready_channel(slow.gateway.settings.listen) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=0.3):
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await slow.until_idle()


async def test_gateways_own_time_limit(socket_dir: Path) -> None:
    for seconds in (0.5, 3.0, 20.0):  # on a busy machine the first token needs longer
        mesh = Mesh(socket_dir, engine=SLOW, gateway={"request_timeout": seconds})
        async with mesh.running(), mesh.http() as http:
            response = await http.post("/v1/completions", json=LONG)
            assert response.status_code == 504
            assert response.json()["error"]["type"] == "timeout_error"
            async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as streamed:
                lines = [line async for line in streamed.aiter_lines() if line]
            await mesh.until_idle()
        if streamed.status_code == 200:
            break
    assert streamed.status_code == 200
    assert '"deadline_exceeded"' in lines[-1]


async def test_client_that_does_not_read_holds_up_nobody(slow: Mesh) -> None:
    host, _, port = slow.url.removeprefix("http://").rpartition(":")
    body = httpx.Request("POST", slow.url, json={**LONG, "stream": True}).content
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    silent = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(8)]
    for _, writer in silent:
        writer.write(head.encode() + body)
    await slow.until_running(8)
    async with slow.http() as http:
        response = await http.post("/v1/completions", json={**LONG, "max_tokens": 5})
        assert response.status_code == 200
    for _, writer in silent:
        writer.close()
    await slow.until_idle()


async def test_draining_gateway_finishes_what_it_has(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engine={"hash_step_seconds": 0.05}, common={"drain_timeout": SOON})
    async with mesh.running(), mesh.http() as http:
        request = asyncio.create_task(http.post("/v1/completions", json={**LONG, "max_tokens": 40}))
        await mesh.until_running()
        await mesh.gateway.stop()
        response = await request
    assert response.json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(("drain", "drain_timeout"), [("migrate", SOON), ("finish", 0.2)])
async def test_engines_that_leave_in_turn_lose_nothing(socket_dir: Path, drain: str, drain_timeout: float) -> None:
    """Each engine leaves under load and returns before the next one leaves; then the last one leaves alone."""
    settings = {"hash_step_seconds": 0.02, "drain": drain}
    mesh = Mesh(socket_dir, engines=2, engine=settings, common={"drain_timeout": drain_timeout})
    body = {**LONG, "max_tokens": 100, "return_token_ids": True}
    async with mesh.running(), mesh.http() as http:
        greedy = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(4)]
        several = asyncio.create_task(http.post("/v1/completions", json={**body, "n": 3, "logprobs": 0}))
        await mesh.until_running(7)
        for engine in mesh.engines:
            await engine.stop()
            await engine.start()
        responses = await asyncio.gather(*greedy, several)
        await mesh.until_idle()
    for response in responses:
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert len(choice["token_ids"]) == 100
        assert response.json()["choices"][0]["token_ids"] == mesh.expected([1, 2, 3], 100)
    (logprobs,) = {len(choice["logprobs"]["token_logprobs"]) for choice in responses[-1].json()["choices"]}
    assert logprobs == 100, "none is missing or doubled"
