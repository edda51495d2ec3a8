"""Two tenants on one engine: they take turns at the grammar compilers and at the seats of the batch."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.mesh.asking import ask
from tests.mesh.harness import MODEL, SOON
from tests.mesh.tenants.test_greedy_tenants import CANARY, GREEDY, PROMPT, running_mesh

NUM_BOMBS = 128
_MANY = httpx.Limits(max_connections=None)


async def until_loaded(
    http: httpx.AsyncClient, num_requests: int, tasks: Sequence["asyncio.Task[httpx.Response]"] = ()
) -> None:
    """Wait until so many requests are live, or have ended: those of ``tasks``."""
    async with asyncio.timeout(SOON):
        while await _num_live(http) + sum(task.done() for task in tasks) < num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _num_live(http: httpx.AsyncClient) -> int:
    return int((await http.get("/load")).json()["server_load"])


@pytest.mark.timeout(120)
async def test_abandoned_bombs_of_one_tenant_delay_no_grammar_of_another(socket_dir: Path) -> None:
    """Each takes a second or two of a compiler. The exact time: ``python -m tests.soak.bombs``."""
    gateway = {"tenant_pending_grammars": NUM_BOMBS}
    async with (
        running_mesh(socket_dir, {}, **gateway) as mesh,
        mesh.http(headers=CANARY) as http,
        mesh.http(headers=GREEDY, limits=_MANY) as greedy,
    ):
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20}
        bombs = [
            asyncio.create_task(
                greedy.post(
                    "/v1/completions",
                    json={**body, "structured_outputs": {"json": {"type": "integer", "multipleOf": 99_999_989 - n}}},
                )
            )
            for n in range(NUM_BOMBS)
        ]
        await until_loaded(http, NUM_BOMBS, bombs)
        for bomb in bombs:
            bomb.cancel()
        await asyncio.wait(bombs)
        assert sum(bomb.cancelled() for bomb in bombs) > NUM_BOMBS / 2, "most are abandoned before they are refused"
        answer = await http.post("/v1/completions", json={**body, "structured_outputs": {"regex": "[0-9]{4}"}})
        assert re.fullmatch("[0-9]{4}", answer.json()["choices"][0]["text"]), answer.text


async def test_one_request_of_many_samples_leaves_seats_to_others(socket_dir: Path) -> None:
    """It takes all seats, and one of its samples is preempted for each request of the other tenant."""
    engine = {"hash_step_seconds": 0.01, "max_num_seqs": 16}
    large = {"model": MODEL, "prompt": PROMPT, "n": 32, "temperature": 1, "max_tokens": 150, "ignore_eos": True}
    async with (
        running_mesh(socket_dir, engine) as mesh,
        mesh.http(headers=CANARY) as http,
        mesh.http(headers=GREEDY) as greedy,
    ):
        samples = asyncio.create_task(greedy.post("/v1/completions", json={**large, "return_token_ids": True}))
        await until_loaded(http, 32)
        for number in range(4):
            answer = await ask(http, [*PROMPT, number], 4)
            assert answer.token_ids == mesh.expected([*PROMPT, number], 4)
            assert not samples.done(), "the other request waited for its end"
        answer = (await samples).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [mesh.expected(PROMPT, 150)] * 32
