"""One tenant takes all that it can get while another one is served, through all services."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.mesh.asking import ask
from tests.mesh.harness import MODEL, SOON, Mesh
from tokenloom.request import errors
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

GREEDY, CANARY = {"authorization": "Bearer greedy-key"}, {"authorization": "Bearer canary-key"}
PROMPT = list(range(1, 40))
NUM_SESSIONS, NUM_CHANNELS = 1200, 12
ADMITTED = 256
"""Sessions of one tenant, by default."""


@asynccontextmanager
async def running_mesh(directory: Path, engine: dict[str, Any], **gateway: Any) -> AsyncIterator[Mesh]:
    file = directory / "keys.toml"
    tables = []
    for name in ("greedy", "canary"):
        digest = hashlib.sha256(f"{name}-key".encode()).hexdigest()
        tables.append(f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{digest}"]\n')
    file.write_text("\n".join(tables))
    gateway = {"api_key_file": file, "cache_salt_secret": "s" * 32, **gateway}
    async with Mesh(directory, engine=engine, gateway=gateway).running() as mesh:
        yield mesh


async def refused(http: httpx.AsyncClient, limit: str) -> int:
    """Requests of the greedy tenant that this limit refused."""
    page = (await http.get("/metrics", headers=CANARY)).text
    start = f'tokenloom_tenant_refused_requests_total{{limit="{limit}",tenant="greedy"}} '
    return next((round(float(line.removeprefix(start))) for line in page.splitlines() if line.startswith(start)), 0)


def turn() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL,
        token_ids=types_pb2.TokenIds(ids=PROMPT),
        sampling_params=types_pb2.SamplingParams(max_tokens=4, temperature=0.0),
        ignore_eos=True,
    )


async def test_idle_sessions_of_one_key_refuse_no_other_key(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, {}) as mesh, mesh.http(headers=CANARY) as http, AsyncExitStack() as stack:
        address = mesh.gateway.settings.listen
        stubs = [
            inference_pb2_grpc.InferenceStub(await stack.enter_async_context(open_channel(address)))
            for _ in range(NUM_CHANNELS)
        ]
        calls = [
            stubs[number % NUM_CHANNELS].GenerateSession(metadata=tuple(GREEDY.items()))
            for number in range(NUM_SESSIONS)
        ]
        ends = [asyncio.ensure_future(call.code()) for call in calls]
        async with asyncio.timeout(SOON):
            while sum(end.done() for end in ends) < NUM_SESSIONS - ADMITTED:
                await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            assert {end.result() for end in ends if end.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert await refused(http, "sessions") == NUM_SESSIONS - ADMITTED
            session = stubs[0].GenerateSession(metadata=tuple(CANARY.items()))
            await session.write(turn())
            await session.done_writing()
            tokens = [token for response in [r async for r in session] for token in response.token_ids]
            assert tokens == mesh.expected(PROMPT, 4)
            assert (await ask(http, PROMPT, 8)).token_ids == mesh.expected(PROMPT, 8)
        for call in calls:
            call.cancel()
        await asyncio.wait(ends)


async def test_large_requests_of_one_key_leave_room_for_another(socket_dir: Path) -> None:
    """The greedy tenant sends requests of 128 samples with log probabilities until it is refused."""
    engine = {"hash_step_seconds": 0.01}
    large = {"prompt": PROMPT, "n": 128, "logprobs": 5, "temperature": 1.0, "max_tokens": 64}
    async with (
        running_mesh(socket_dir, engine, max_live_requests=512) as mesh,
        mesh.http(headers=CANARY) as http,
        mesh.http(headers=GREEDY) as greedy,
    ):
        live = [asyncio.create_task(greedy.post("/v1/completions", json=large)) for _ in range(2)]
        async with asyncio.timeout(SOON):
            while (await http.get("/load")).json()["server_load"] < 256:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            limited = await greedy.post("/v1/completions", json=large)
            assert (limited.status_code, limited.json()["error"]["limit"]) == (429, "live_outputs")
            answers = await asyncio.gather(*(ask(http, [*PROMPT, number], 4) for number in range(8)))
            for number, answer in enumerate(answers):
                assert answer.token_ids == mesh.expected([*PROMPT, number], 4)
            assert await refused(http, "live_outputs") == 1
        for task in live:
            task.cancel()
        await asyncio.wait(live)


async def test_a_refused_client_is_served_after_the_time_it_was_given(socket_dir: Path) -> None:
    """As OpenAI's client does it: wait for Retry-After, send the request again."""
    limits = {"tenant_tokens_per_second": 400.0, "tenant_token_burst": 60}
    async with running_mesh(socket_dir, {}, **limits) as mesh, mesh.http(headers=GREEDY) as http:
        body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        again = await http.post("/v1/completions", json=body)
        assert again.status_code == 429
        assert errors.RateLimitExceeded.reason.lower() == again.json()["error"]["code"]
        await asyncio.sleep(float(again.headers["retry-after"]))
        assert (await http.post("/v1/completions", json=body)).status_code == 200
