"""Errors before and after a stream has begun, admission, time limits and clients that leave."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import HEADERS, MODEL, SOON, FakeMesh
from tokenloom.request import errors

BODY: dict[str, Any] = {"model": MODEL, "prompt": "a"}
STREAM = {**BODY, "stream": True}


async def test_an_error_before_the_first_output_has_a_status(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(http.post("/v1/completions", json=STREAM))
    (await mesh.outputs.next_request()).fail(errors.ResourceExhausted("full"))
    response = await task
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"


async def test_an_error_mid_stream_is_its_last_event(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    submitted = asyncio.create_task(mesh.outputs.next_request())
    submitted.add_done_callback(lambda task: task.result().send("begun", [1]))
    async with http.stream("POST", "/v1/completions", json=STREAM) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert "begun" in await anext(lines)
        (await submitted).fail(errors.Unavailable("gone"))
        *_, last = [line async for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


async def test_a_bug_is_reported_without_its_cause(
    mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("at /secret/path, 0xdeadbeef")

    monkeypatch.setattr("tokenloom.services.gateway.generation.preparation._resolve", broken)
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    assert "secret" in caplog.text


async def test_request_ids_are_echoed_when_fit(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    for sent, echoed in (("mine-1", True), ("x" * 129, False), ("two words", False)):
        response = await http.post("/v1/completions", json=BODY, headers={"x-request-id": sent})
        assert (response.headers["x-request-id"] == sent) is echoed
    response = await http.get("/health", headers={"x-request-id": "h"})
    assert response.headers["x-request-id"] == "h"


async def test_more_than_the_limit_is_refused_for_now(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(max_live_requests=2) as mesh, mesh.http() as http:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(2)]
        requests = [await mesh.outputs.next_request() for _ in tasks]
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "resource_exhausted"
        assert refused.headers["retry-after"] == "1"
        for request in requests:
            request.answer("x")
        assert [(await task).status_code for task in tasks] == [200, 200]
        mesh.outputs.auto = ["x"]
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_time_limit(socket_dir: Path) -> None:
    for seconds in (0.2, 2.0, 20.0):  # on a busy machine the request needs longer to arrive
        async with FakeMesh(socket_dir).gateway(request_timeout=seconds) as mesh, mesh.http() as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 504
            if not mesh.outputs.requests.empty():
                request = await mesh.outputs.next_request()
                assert 0 < request.submit.timeout.ToNanoseconds() <= seconds * 1e9
                await asyncio.wait_for(request.cancelled.wait(), SOON)
                return
    raise AssertionError("no request arrived")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_cancelled(mesh: FakeMesh, http: httpx.AsyncClient, stream: bool) -> None:
    task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": stream}))
    request = await mesh.outputs.next_request()
    request.send("some", [1])
    task.cancel()
    async with asyncio.timeout(30):
        await request.cancelled.wait()


async def test_a_client_that_leaves_before_its_body_is_complete(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    host, _, port = mesh.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: 100\r\n\r\n{" % HEADERS)
    await writer.drain()
    writer.close()
    mesh.outputs.auto = ["x"]
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_slow_client_gets_everything_merged(mesh: FakeMesh) -> None:
    """Writers never wait for a client, and nothing is lost on it."""
    host, _, port = mesh.http_address.rpartition(":")
    body = json.dumps({**STREAM, "max_tokens": 400}).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEADERS, len(body)) + body)
    request = await mesh.outputs.next_request()
    piece = "x" * 20_000
    for number in range(400):
        request.send(piece, [number % 256])
    request.finish()
    text = b""
    while b"[DONE]" not in text[-100:]:
        text += await asyncio.wait_for(reader.read(1 << 20), SOON)
    assert text.count(b"x" * 100) >= 400 * 200
    writer.close()
