"""Requests to a mesh without room: which are refused, and what a refusal costs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import SOON, FakeMesh, FakeRequest
from tokenloom.services.gateway.records.request_ids import id_of_key
from tokenloom.v1 import coordinator_pb2

BODY = {"prompt": "text", "max_tokens": 3}


@asynccontextmanager
async def busy_gateway(directory: Path, **report: float) -> AsyncIterator[tuple[FakeMesh, httpx.AsyncClient]]:
    """A gateway whose requests may wait for 2 s, before an engine with this report."""
    mesh = FakeMesh(directory)
    mesh.coordinator.report = coordinator_pb2.EngineReport(**report)  # type: ignore[arg-type]
    async with mesh.gateway(max_queue_seconds=2.0, always_queued=0), mesh.http() as http:
        yield mesh, http


async def start(mesh: FakeMesh, http: httpx.AsyncClient, **body: Any) -> tuple[Awaitable[httpx.Response], FakeRequest]:
    task = asyncio.create_task(http.post("/v1/completions", json=BODY | body))
    return task, await mesh.outputs.next_request()


async def wait_seconds(http: httpx.AsyncClient) -> float:
    page = (await http.get("/metrics")).text
    line = next(line for line in page.splitlines() if line.startswith("tokenloom_queue_wait_seconds{"))
    return float(line.rpartition(" ")[2])


async def refused(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    response = await http.post("/v1/completions", json=BODY | body)
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "resource_exhausted"
    return response


@pytest.mark.parametrize("prompt", ["text", ["text", "another text"]])
async def test_a_repeat_is_not_refused_where_an_output_processor_has_its_request(
    socket_dir: Path, prompt: str | list[str]
) -> None:
    """Another gateway had accepted it, and was lost; its client, which repeated the call, got 503."""
    async with busy_gateway(socket_dir, seats=4, starts_per_second=1.0, running=3) as (mesh, http):
        live = [await start(mesh, http) for _ in range(3)]
        body, key = BODY | {"prompt": prompt}, {"Idempotency-Key": "k"}
        assert (await http.post("/v1/completions", json=body, headers=key)).status_code == 503
        mesh.outputs.begun.add(id_of_key("", "k") + "-0" * isinstance(prompt, list))
        repeating = asyncio.create_task(http.post("/v1/completions", json=body, headers=key))
        for _ in range(1 if isinstance(prompt, str) else 2):
            (await mesh.outputs.next_request()).answer("x")
        assert (await repeating).status_code == 200
        for task, request in live:
            request.answer("x")
            await task


async def test_a_request_that_would_wait_too_long_is_refused_before_it_is_tokenized(socket_dir: Path) -> None:
    async with busy_gateway(socket_dir, seats=4, starts_per_second=1.0, running=3) as (mesh, http):
        live = [await start(mesh, http) for _ in range(3)]  # the last two would wait for 1 s and for 2 s
        num_encoded = mesh.tokenizer.calls + mesh.second_tokenizer.calls
        for _ in range(5):
            response = await refused(http)
            assert int(response.headers["retry-after"]) in (2, 3, 4, 5)  # a wait of 3 s, give or take half
            assert "would wait about 3 s" in response.json()["error"]["message"]
        assert mesh.tokenizer.calls + mesh.second_tokenizer.calls == num_encoded
        live[0][1].answer("x")
        assert (await live[0][0]).status_code == 200
        live.append(await start(mesh, http))
        page = (await http.get("/metrics")).text
        assert 'tokenloom_tenant_refused_requests_total{limit="max_queue_seconds",tenant=""} 5.0' in page
        for task, request in live[1:]:
            request.answer("x")
            assert (await task).status_code == 200


async def test_prompts_in_front_are_work_until_their_first_token(socket_dir: Path) -> None:
    async with busy_gateway(socket_dir, seats=100, prefill_tokens_per_second=100.0) as (mesh, http):
        task, request = await start(mesh, http, prompt=[1] * 120)
        _, second = await start(mesh, http, prompt=[1] * 90)
        await refused(http)
        request.send("x", [120])
        async with asyncio.timeout(SOON):
            while await wait_seconds(http) != pytest.approx(0.9):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        third, last = await start(mesh, http)
        for each in (request, second, last):
            each.finish()
        assert (await task).status_code == (await third).status_code == 200


async def test_a_refused_or_cancelled_request_leaves_nothing_behind(socket_dir: Path) -> None:
    async with busy_gateway(socket_dir, seats=4, starts_per_second=1.0, running=5) as (mesh, http):
        task, request = await start(mesh, http)
        await refused(http)
        task.cancel()  # type: ignore[attr-defined]
        await asyncio.wait_for(request.cancelled.wait(), SOON)
        mesh.outputs.auto = ["x"]
        for _ in range(20):  # each ends before the next one comes
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert await wait_seconds(http) == pytest.approx(2.0)


async def test_a_less_urgent_request_may_wait_less(socket_dir: Path) -> None:
    async with busy_gateway(socket_dir, seats=4, starts_per_second=1.0, running=5) as (mesh, http):
        mesh.outputs.auto = ["x"]
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200  # waits for 2 s, by the estimate
        await refused(http, priority=1)


async def promises(http: httpx.AsyncClient) -> dict[str, int]:
    """Return how many requests with a deadline for their first token had each outcome."""
    lines = [line for line in (await http.get("/metrics")).text.splitlines() if "gateway_promises_total{" in line]
    return {line.split('outcome="')[1].partition('"')[0]: round(float(line.rpartition(" ")[2])) for line in lines}


async def test_a_deadline_for_the_first_token_is_promised_or_refused_at_once(socket_dir: Path) -> None:
    async with busy_gateway(socket_dir, seats=100, prefill_tokens_per_second=100.0) as (mesh, http):
        assert await promises(http) == {"kept": 0, "broken": 0, "refused": 0}
        task, request = await start(mesh, http, prompt=[1] * 100, ttft_deadline=60)
        # 1 s for the prompt before it, 0.5 for its own, and as much and 0.1 again: nothing is known of the errors yet.
        response = await refused(http, prompt=[1] * 50, ttft_deadline=3.05)
        error = response.json()["error"]
        assert error["param"] == "ttft_deadline"
        assert "after about 1.5 s, and 3.1 s at the latest; 3.05 s cannot be promised" in error["message"]
        assert int(response.headers["retry-after"]) >= 1
        second, follower = await start(mesh, http, prompt=[1] * 40, ttft_deadline=4)
        for each in (request, follower):
            each.answer("x")
        assert (await task).status_code == (await second).status_code == 200
        assert await promises(http) == {"kept": 2, "broken": 0, "refused": 1}
        third, last = await start(mesh, http)  # without a deadline it teaches how wrong forecasts are
        last.answer("x")
        assert (await third).status_code == 200


async def test_no_first_token_is_promised_while_no_engine_serves(socket_dir: Path) -> None:
    async with busy_gateway(socket_dir, seats=100, prefill_tokens_per_second=100.0) as (mesh, http):
        task, request = await start(mesh, http, ttft_deadline=60)
        request.answer("x")
        assert (await task).status_code == 200
        await mesh.coordinator.set_engines()
        async with asyncio.timeout(SOON):
            while 'engine="engine-0"' in (await http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        error = (await refused(http, ttft_deadline=60)).json()["error"]
        assert error["param"] == "ttft_deadline"
        assert "no engine serves" in error["message"]
        waiting, held = await start(mesh, http)  # without a deadline it waits
        held.answer("x")
        assert (await waiting).status_code == 200
        assert await promises(http) == {"kept": 1, "broken": 0, "refused": 1}


@pytest.mark.parametrize("deadline", [0, -1, 3601, "soon"])
async def test_a_deadline_that_is_none_is_an_error(socket_dir: Path, deadline: object) -> None:
    async with busy_gateway(socket_dir, seats=4) as (_, http):
        response = await http.post("/v1/completions", json=BODY | {"ttft_deadline": deadline})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "ttft_deadline"
        search = await http.post("/v1/completions", json=BODY | {"ttft_deadline": 1, "use_beam_search": True})
        assert search.status_code == 400
        assert search.json()["error"]["param"] == "ttft_deadline"
        assert sum((await promises(http)).values()) == 0
