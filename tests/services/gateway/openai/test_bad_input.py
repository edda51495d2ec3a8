"""Bad input is refused at once with the field's name, without an effect on other clients."""

import asyncio
import gzip
import json
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.cpu_time import MOST_TIMES_USUAL, least_cpu_seconds, usual_cpu_seconds
from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tests.services.gateway.openai.bad_requests import CHAT, COMPLETIONS, RAW_BODIES, bad_bodies, bad_calls
from tokenloom.services.gateway.http import request_body
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

JSON = {"content-type": "application/json"}
HEADERS = "Host: localhost\r\nContent-Type: application/json\r\n"
BODIES = bad_bodies(LIMITS.vocab_size, LIMITS.max_model_len)
CALLS = bad_calls(MODEL, LIMITS.vocab_size, LIMITS.max_model_len)
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
}


async def refused(http: httpx.AsyncClient, path: str, body: bytes, most: float) -> tuple[httpx.Response, float]:
    """Return the response and the processor time that it took: gateway, client and fake mesh share this thread."""
    responses = []

    async def post() -> None:
        responses.append(await http.post(path, content=body, headers=JSON))

    seconds = await least_cpu_seconds(post, most)
    return responses[0], seconds


async def most_cpu_seconds(http: httpx.AsyncClient) -> float:
    """Return the processor time within which a bad request must be refused."""
    return MOST_TIMES_USUAL * await usual_cpu_seconds(lambda: http.post(COMPLETIONS, json={"model": MODEL}))


async def test_every_bad_body_is_refused_by_field(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    canary = asyncio.create_task(http.post(COMPLETIONS, json=GOOD[COMPLETIONS]))
    request = await mesh.outputs.next_request()
    slow: list[str] = []
    most = await most_cpu_seconds(http)
    for bad in BODIES:
        good = {k: v for k, v in GOOD[bad.path].items() if not (bad.param == "prompt" and k == "prompt")}
        response, seconds = await refused(http, bad.path, json.dumps({**good, **bad.fields}).encode(), most)
        assert response.status_code == bad.status, (bad, response.text)
        error = response.json()["error"]
        assert error["param"] == bad.param, (bad, error)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert len(error["message"]) < 500
        if seconds > most:
            slow.append(f"{bad}: {seconds:.3f} s of the processor")
    assert not slow
    assert mesh.outputs.requests.empty(), "nothing bad went on"
    request.answer("fine")
    assert (await canary).json()["choices"][0]["text"] == "fine"


async def test_unknown_model_has_openais_code(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "a"})
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("body", RAW_BODIES.values(), ids=RAW_BODIES.keys())
async def test_a_body_that_is_not_a_json_object(http: httpx.AsyncClient, body: bytes) -> None:
    most = await most_cpu_seconds(http)
    response, seconds = await refused(http, COMPLETIONS, body, most)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert seconds < most


async def test_content_length_is_refused_before_reading(mesh: FakeMesh) -> None:
    host, _, port = mesh.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\n{HEADERS}Content-Length: 100000000\r\nExpect: 100-continue\r\n\r\n"
    writer.write(head.encode())  # and not a byte of the body
    status = await asyncio.wait_for(reader.readline(), 30)
    assert status.split()[1] == b"413"
    writer.close()


async def test_chunked_body_is_cut_at_the_limit(socket_dir: Any) -> None:
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(256):
            sent += 1 << 16
            yield b" " * (1 << 16)

    async with FakeMesh(socket_dir).gateway(max_body_bytes=1 << 18) as mesh, mesh.http() as http:
        response = await http.post(COMPLETIONS, content=chunks(), headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "payload_too_large"
        mesh.outputs.auto = ["ok"]
        assert (await http.post(COMPLETIONS, json=GOOD[COMPLETIONS])).status_code == 200


async def test_a_body_without_an_end_is_given_up(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
    host, _, port = mesh.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f'POST {COMPLETIONS} HTTP/1.1\r\n{HEADERS}Content-Length: 1000\r\n\r\n{{"prompt": '.encode())
    status = await asyncio.wait_for(reader.readline(), 30)
    assert status.split()[1] == b"408"
    writer.close()


async def test_compressed_bodies_are_refused(http: httpx.AsyncClient) -> None:
    body = gzip.compress(json.dumps(GOOD[COMPLETIONS]).encode())
    response = await http.post(COMPLETIONS, content=body, headers=JSON | {"content-encoding": "gzip"})
    assert response.status_code == 415


async def test_endless_head_is_cut(mesh: FakeMesh) -> None:
    host, _, port = mesh.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\n")
    sent = 0
    try:
        while not reader.at_eof() and sent < 1 << 24:
            writer.write(b"x: %s\r\n" % (b"y" * 1000))
            sent += 1000
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    assert sent < 1 << 24
    writer.close()


@pytest.mark.parametrize("path", ["/v2", "/v1", "/doc", "/v1/completions/", "/metrics/../v1"])
async def test_unknown_paths(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json={})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_wrong_method(http: httpx.AsyncClient) -> None:
    response = await http.get(COMPLETIONS)
    assert response.status_code == 405


async def test_unknown_fields_are_ignored_with_one_warning(
    mesh: FakeMesh, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.outputs.auto = ["ok"]
    for _ in range(2):
        response = await http.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "shiny": 1})
        assert response.status_code == 200
    assert sum("shiny" in record.getMessage() for record in caplog.records) == 1


async def test_strict_refuses_unknown_fields(socket_dir: Any) -> None:
    async with FakeMesh(socket_dir).gateway(strict=True) as mesh, mesh.http() as http:
        response = await http.post(COMPLETIONS, json={**GOOD[COMPLETIONS], "shiny": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "shiny"


async def test_every_bad_call_is_refused_by_field(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        for name, (request, field) in CALLS.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(request):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, caught.value)
            assert violated_field(caught.value) == field, name
        mesh.outputs.auto = ["fine"]
        good = inference_pb2.GenerateRequest(model=MODEL, text="a")
        assert "".join([response.text async for response in stub.Generate(good)]) == "fine"


async def test_unknown_model_over_grpc(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(model="gpt-9", text="a"))))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_negative_token_ids_cannot_even_be_written() -> None:
    with pytest.raises(ValueError):
        inference_pb2.GenerateRequest(token_ids={"ids": [-1]})


async def test_raw_garbage_over_grpc(mesh: FakeMesh) -> None:
    async with open_channel(mesh.grpc_address) as channel:
        generate = channel.unary_stream("/tokenloom.v1.Inference/Generate", lambda data: data)
        with pytest.raises(grpc.aio.AioRpcError) as garbage:
            await anext(aiter(generate(b"\xff" * 100)))
        assert garbage.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as huge:  # as large as no HTTP body may be
            await anext(aiter(generate(inference_pb2.GenerateRequest(text="x" * (9 << 20)).SerializeToString())))
        assert huge.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        models = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
    assert [model.name for model in models.models] == [MODEL]


def violated_field(error: grpc.aio.AioRpcError) -> str | None:
    """The field that google.rpc.BadRequest names."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:  # type: ignore[arg-type]
                bad = error_details_pb2.BadRequest()
                if detail.Unpack(bad):
                    return bad.field_violations[0].field
    return None
