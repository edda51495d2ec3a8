"""One tenant takes all that it can get while another one is served, through all services."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.asking import ask
from tests.mesh.harness import MODEL, SOON, Mesh
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

GREEDY, CANARY = {"authorization": "Bearer greedy-key"}, {"authorization": "Bearer canary-key"}
PROMPT = list(range(1, 40))
NUM_SESSIONS, NUM_CHANNELS = 492, 6
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


async def greedy_counts(http: httpx.AsyncClient) -> tuple[int, dict[str, int]]:
    """The greedy tenant's open sessions, and its refused requests by the limit that refused them."""
    sessions, refused = 0, {}
    for family in text_string_to_metric_families((await http.get("/metrics", headers=CANARY)).text):
        for sample in family.samples:
            if sample.labels.get("tenant") == "greedy" and sample.name == "tokenloom_tenant_sessions":
                sessions = round(sample.value)
            if sample.labels.get("tenant") == "greedy" and sample.name == "tokenloom_tenant_refused_requests_total":
                refused[sample.labels["limit"]] = round(sample.value)
    return sessions, refused


def turn() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL,
        token_ids=types_pb2.TokenIds(ids=PROMPT),
        sampling_params=types_pb2.SamplingParams(max_tokens=4, temperature=0.0),
        ignore_eos=True,
    )


def open_session(stub: "inference_pb2_grpc.InferenceAsyncStub") -> Any:
    """Open a session of the greedy tenant, which sends no turn."""
    return stub.GenerateSession(metadata=tuple(GREEDY.items()))


async def test_idle_sessions_of_one_key_refuse_no_other_key(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, {}) as mesh, mesh.http(headers=CANARY) as http, AsyncExitStack() as stack:
        address = mesh.gateway.settings.listen
        stubs = [
            inference_pb2_grpc.InferenceStub(await stack.enter_async_context(open_channel(address)))
            for _ in range(NUM_CHANNELS)
        ]
        calls = [open_session(stubs[number % NUM_CHANNELS]) for number in range(ADMITTED)]
        async with asyncio.timeout(2 * SOON):
            while (await greedy_counts(http))[0] < ADMITTED:
                pass
            for _ in range(ADMITTED, NUM_SESSIONS, 118):
                wave = [open_session(stubs[number % NUM_CHANNELS]) for number in range(118)]
                codes = await asyncio.gather(*(call.code() for call in wave))
                assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            sessions, refused = await greedy_counts(http)
            assert (sessions, refused["sessions"]) == (ADMITTED, NUM_SESSIONS - ADMITTED)
            session = stubs[0].GenerateSession(metadata=tuple(CANARY.items()))
            await session.write(turn())
            await session.done_writing()
            tokens = [token for response in [r async for r in session] for token in response.token_ids]
            assert tokens == mesh.expected(PROMPT, 4)
            assert (await ask(http, PROMPT, 8)).token_ids == mesh.expected(PROMPT, 8)
        for call in calls:
            call.cancel()


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
            _, refused = await greedy_counts(http)
            assert refused["live_outputs"] == 1
        for task in live:
            task.cancel()
        await asyncio.wait(live)
