"""Each request that has ended is kept and logged once, over every API, without what it said."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.loop_clock import settle
from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.services.runtime.telemetry.logs import JsonFormatter
from tokenloom.v1 import inference_pb2

SECRET, OTHER = "a secret key", "another secret key"
ADMIN = {"authorization": "Bearer root"}
CHAT = {"messages": [{"role": "user", "content": "a secret word"}]}
LINES = logging.getLogger("tokenloom.services.gateway.request_log.access_log")


def digits(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The lines of the access log, as JSON."""
    formatter, handler = JsonFormatter("gateway", "gateway-0"), logging.Handler()
    found: list[dict[str, Any]] = []
    handler.emit = lambda record: found.append(json.loads(formatter.format(record)))  # type: ignore[method-assign]
    LINES.addHandler(handler)
    LINES.setLevel(logging.INFO)
    yield found
    LINES.removeHandler(handler)
    LINES.setLevel(logging.NOTSET)


async def last_requests(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    response = await http.get("/requests", headers=ADMIN)
    assert response.status_code == 200
    found: list[dict[str, Any]] = response.json()["requests"]
    return found


async def test_answers_and_refusals_of_every_api(socket_dir: Path, lines: list[dict[str, Any]]) -> None:
    keys = {"api_key": (SECRET, OTHER), "admin_api_key": ("root",)}
    async with FakeMesh(socket_dir).gateway(**keys) as mesh, mesh.http() as http:
        mesh.outputs.auto = ["Hel", "lo"]
        sent = {"authorization": f"Bearer {SECRET}", "x-request-id": "client-7"}
        (await http.post("/v1/chat/completions", json=CHAT, headers=sent)).raise_for_status()
        (await http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=sent)).raise_for_status()
        sent = {"x-api-key": OTHER}
        (
            await http.post("/v1/messages", json=CHAT | {"model": MODEL, "max_tokens": 9}, headers=sent)
        ).raise_for_status()
        (await http.post("/v1/responses", json={"input": "a secret word"}, headers=sent)).raise_for_status()
        assert (await http.post("/v1/completions", json={"prompt": ""}, headers={})).status_code == 401
        assert (await http.get("/nowhere", headers=sent)).status_code == 404
        (await http.get("/health")).raise_for_status()
        metadata = (("authorization", f"Bearer {SECRET}"),)
        async with mesh.inference() as stub:
            request = inference_pb2.GenerateRequest(text="a secret word", user_request_id="call-1")
            async for _ in stub.Generate(request, metadata=metadata):
                pass
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(), metadata=metadata)))
        found = await last_requests(http)
        page = (await http.get("/metrics", headers={"x-api-key": SECRET})).text
    brief = [(each["route"], each["status"], each["reason"], each["key"], each["output_tokens"]) for each in found]
    generate = "/tokenloom.v1.Inference/Generate"
    assert brief == [
        (generate, 400, "INVALID_ARGUMENT", digits(SECRET), 0),
        (generate, 200, "", digits(SECRET), 5),
        ("other", 404, "NOT_FOUND", digits(OTHER), 0),
        ("/v1/completions", 401, "UNAUTHENTICATED", "", 0),
        ("/v1/responses", 200, "", digits(OTHER), 5),
        ("/v1/messages", 200, "", digits(OTHER), 5),
        ("/v1/chat/completions", 200, "", digits(SECRET), 5),
        ("/v1/chat/completions", 200, "", digits(SECRET), 5),
    ]
    assert found[-1]["request_id"] == "client-7"
    assert found[1]["request_id"] == "call-1"
    assert all(each["cached_tokens"] == 1 and each["prompt_tokens"] > 1 for each in found if each["output_tokens"])
    assert all(0 <= each["ttft_seconds"] <= each["seconds"] for each in found if each["output_tokens"])
    assert [line["message"] for line in lines] == [f"{each[0]} {each[1]}" for each in reversed(brief)]
    assert lines[0].items() >= {"request_id": "client-7", "output_tokens": 5, "model": MODEL}.items()
    assert lines[0]["generation_id"] == found[-1]["generation_id"]
    assert f'tokenloom_key_requests_total{{key="{digits(SECRET)}",tenant="key:{digits(SECRET)}"}} 3.0' in page
    assert f'tokenloom_key_output_tokens_total{{key="{digits(OTHER)}",tenant="key:{digits(OTHER)}"}} 10.0' in page
    assert f'tokenloom_key_cached_tokens_total{{key="{digits(OTHER)}",tenant="key:{digits(OTHER)}"}} 2.0' in page
    assert 'tokenloom_grpc_responses_total{code="OK",method="/tokenloom.v1.Inference/Generate",reason=""} 1.0' in page
    assert "secret" not in f"{found}{lines}{page}"


async def test_a_client_that_leaves(socket_dir: Path, lines: list[dict[str, Any]]) -> None:
    async with FakeMesh(socket_dir).gateway(admin_api_key=("root",)) as mesh, mesh.http() as http:
        leaving = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        request = await mesh.outputs.next_request()
        request.send("Hel", [1, 2, 3])
        leaving.cancel()
        await request.cancelled.wait()
        await settle()
        found = await last_requests(http)
    assert [(each["status"], each["reason"]) for each in found] == [(499, "CANCELLED")]
    assert found[0]["generation_id"]
    assert lines[0]["reason"] == "CANCELLED"


async def test_the_flag_turns_the_lines_off(socket_dir: Path, lines: list[dict[str, Any]]) -> None:
    gateway = FakeMesh(socket_dir).gateway(access_log=False, admin_api_key=("root",))
    async with gateway as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        (await http.post("/v1/chat/completions", json=CHAT)).raise_for_status()
        assert len(await last_requests(http)) == 1
    assert lines == []


async def test_only_the_admin_key_sees_the_last_requests(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("user",), admin_api_key=("root",)) as mesh, mesh.http() as http:
        assert (await http.get("/requests", headers={"authorization": "Bearer user"})).status_code == 401
        assert (await http.get("/requests")).status_code == 401
        assert (await http.get("/requests", headers=ADMIN)).status_code == 200


async def test_without_an_admin_key_the_last_requests_are_not_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/requests")).status_code == 404
