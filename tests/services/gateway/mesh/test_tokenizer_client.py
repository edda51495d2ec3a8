"""Replicas of the tokenizer: turns, retries, and replicas that differ from the first one."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.services.gateway.fakes import SOON, FakeMesh

BODY = {"prompt": "text", "max_tokens": 3}


async def test_calls_take_turns(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    for _ in range(6):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert mesh.tokenizer.calls == mesh.second_tokenizer.calls == 3


async def test_an_unavailable_replica_is_passed_over(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    mesh.tokenizer.unavailable = True
    for _ in range(4):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert mesh.tokenizer.calls >= 1


async def test_all_unavailable(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.tokenizer.unavailable = mesh.second_tokenizer.unavailable = True
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    mesh.tokenizer.unavailable = False
    mesh.outputs.auto = ["x"]
    async with asyncio.timeout(30):
        while (await http.post("/v1/completions", json=BODY)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_replica_of_another_model_gets_nothing(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.second_tokenizer.fingerprint.tokenizer = b"other" * 4
    mesh.second_tokenizer.tells.clear()  # the first to answer is the one that is served
    async with mesh.gateway(), mesh.http() as http:
        mesh.second_tokenizer.tells.set()
        async with asyncio.timeout(SOON):
            while "differs from the first one" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        mesh.outputs.auto = ["x"]
        for _ in range(4):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert mesh.second_tokenizer.calls == 0
