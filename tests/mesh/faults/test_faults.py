"""A part dies: its requests end at once in a typed, retryable error, and when it is back the mesh answers as before."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.mesh.harness import MODEL, Mesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

LONG: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}
SLOW = {"hash_step_seconds": 0.05}


async def answers(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = {**LONG, "max_tokens": 5, "return_token_ids": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == mesh.expected([1, 2, 3], 5)


async def stream_lines(http: httpx.AsyncClient, **fields: Any) -> list[str]:
    async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, **fields}) as response:
        return [line async for line in response.aiter_lines() if line]


async def test_requests_wait_for_an_engine_and_continue(socket_dir: Path) -> None:
    """The only engine dies under requests that have output, and another request arrives while no engine serves."""
    async with Mesh(socket_dir, engine=SLOW).running() as mesh, mesh.http() as http:
        body = {**LONG, "max_tokens": 40, "return_token_ids": True}
        begun = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        await mesh.until_running(2)
        (engine,) = mesh.engines
        await engine.kill()
        await mesh.until_missing("engine")
        new = asyncio.create_task(http.post("/v1/completions", json=body))
        with pytest.raises(grpc.aio.AioRpcError, match="No engine could take the request before its deadline") as late:
            await generate(mesh, timeout=1.0)
        assert late.value.code() is grpc.StatusCode.UNAVAILABLE
        await engine.start()
        for response in await asyncio.gather(*begun, new):
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == mesh.expected([1, 2, 3], 40)
        await mesh.until_idle()


async def generate(mesh: Mesh, timeout: float) -> None:
    """Reads one answer to its end."""
    request = inference_pb2.GenerateRequest(
        model=MODEL, text="a", sampling_params=types_pb2.SamplingParams(max_tokens=5), ignore_eos=True
    )
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout):
            pass


async def test_requests_wait_until_the_only_output_processor_is_back(socket_dir: Path) -> None:
    async with Mesh(socket_dir, engine=SLOW).running() as mesh, mesh.http() as http:
        streamed = asyncio.create_task(stream_lines(http, max_tokens=20, return_token_ids=True))
        await mesh.until_running(1)
        (victim,) = mesh.output_processors
        await victim.kill()
        await mesh.until_missing("output_processor")
        new = asyncio.create_task(answers(mesh, http))
        await victim.start()
        await new
        events = [json.loads(line.removeprefix("data: ")) for line in (await streamed)[:-1]]
        token_ids = [i for event in events for choice in event["choices"] for i in choice["token_ids"]]
        assert token_ids == mesh.expected([1, 2, 3], 20)
        await mesh.until_missing()
        await mesh.until_idle()


async def test_a_call_is_told_when_to_come_again(socket_dir: Path) -> None:
    gateway = {"max_kept_prompt_bytes": 1}  # its prompt is not kept, so it ends with its output processor
    async with (
        Mesh(socket_dir, engine=SLOW, gateway=gateway).running() as mesh,
        ready_channel(mesh.gateway.settings.listen) as channel,
    ):
        params = types_pb2.SamplingParams(max_tokens=200)
        request = inference_pb2.GenerateRequest(model=MODEL, text="a", sampling_params=params, ignore_eos=True)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        responses = aiter(call)
        await anext(responses)
        await mesh.output_processors[0].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in responses:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_delay(caught.value) == 1.0


async def test_one_of_two_output_processors_dies(socket_dir: Path) -> None:
    async with Mesh(socket_dir, output_processors=2).running() as mesh, mesh.http() as http:
        await mesh.output_processors[0].kill()
        for _ in range(4):
            await answers(mesh, http)
        await mesh.until_missing()


async def test_one_of_two_tokenizers_dies(socket_dir: Path) -> None:
    async with Mesh(socket_dir, tokenizers=2).running() as mesh, mesh.http() as http:
        await mesh.tokenizers[0].kill()
        for _ in range(4):
            response = await http.post("/v1/completions", json={**LONG, "prompt": "text", "max_tokens": 2})
            assert response.status_code == 200


async def test_without_a_tokenizer_token_ids_still_work_and_texts_wait(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh, mesh.http() as http:
        await mesh.tokenizers[0].kill()
        await mesh.until_missing("tokenizer")
        waiting = asyncio.create_task(http.post("/v1/completions", json={**LONG, "prompt": "text"}))
        await answers(mesh, http)
        assert not waiting.done()
        await mesh.tokenizers[0].start()
        assert (await waiting).status_code == 200
        await mesh.until_missing()


async def test_the_coordinator_is_off_the_data_path(socket_dir: Path) -> None:
    async with Mesh(socket_dir, engine=SLOW).running() as mesh, mesh.http() as http:
        live = asyncio.create_task(http.post("/v1/completions", json={**LONG, "max_tokens": 60}))
        await mesh.until_running()
        await mesh.coordinator.kill()
        await mesh.until_missing("coordinator")
        await answers(mesh, http)
        assert (await live).status_code == 200
        await mesh.coordinator.start()
        await mesh.until_missing()
        await answers(mesh, http)


def retry_delay(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds of google.rpc.RetryInfo."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:  # type: ignore[arg-type]
                retry = error_details_pb2.RetryInfo()
                if detail.Unpack(retry):
                    return retry.retry_delay.ToNanoseconds() / 1e9
    return None
