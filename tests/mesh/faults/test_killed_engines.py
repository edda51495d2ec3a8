"""Engines as processes of their own, which SIGKILL ends in the middle of a hand-over."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON, VOCAB_SIZE
from tests.mesh.split import POLL_SECONDS, SplitMesh
from tests.mesh.test_disaggregation import prompt_of
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

PREFILL = ("--hash-step-seconds", "0.05", "--max-num-batched-tokens", "64")
DECODE = ("--failpoints", "slow_copy", "--hash-step-seconds", "0.01")
FLAGS = (
    *("--worker", "hash", "--max-model-len", "2048", "--num-kv-blocks", "512", "--max-num-seqs", "32"),
    *("--metrics-listen", "", "--kv-transports", "shm", "--log-level", "warning"),
)
Processes = dict[str, asyncio.subprocess.Process]


@asynccontextmanager
async def engine(mesh: SplitMesh, name: str, role: str, flags: Sequence[str]) -> AsyncIterator[Processes]:
    addresses = {"listen": name, "kv-listen": f"{name}-kv", "coordinator": "coordinator-0"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenloom.services.engine", "--instance-id", name, "--role", role, *FLAGS, *flags),
        *(part for flag, to in addresses.items() for part in (f"--{flag}", mesh.address(to))),
    )
    try:
        yield {name: process}
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def running(directory: Path, roles: dict[str, str]) -> AsyncIterator[tuple[httpx.AsyncClient, Processes]]:
    """A mesh of such engines, by name and role."""
    mesh = SplitMesh(directory, ())
    async with AsyncExitStack() as stack:
        processes: Processes = {}
        for name, role in roles.items():
            flags = {"prefill": PREFILL, "decode": DECODE}[role]
            processes |= await stack.enter_async_context(engine(mesh, name, role, flags))
        await stack.enter_async_context(mesh.running())
        await mesh.until_known(*roles)
        yield await stack.enter_async_context(mesh.http()), processes


async def until_running(http: httpx.AsyncClient) -> None:
    """Some engine computes, as far as the gateway knows."""
    running = 0.0
    while not running:
        families = text_string_to_metric_families((await http.get("/metrics")).text)
        gauges = [family for family in families if family.name == "tokenloom_engine_requests_running"]
        running = sum(sample.value for family in gauges for sample in family.samples)
        await asyncio.sleep(POLL_SECONDS)


@pytest.mark.parametrize("while_", ["prefilling", "handing over", "decoding"])
async def test_a_killed_prefill_engine(socket_dir: Path, while_: str) -> None:
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    async with running(socket_dir, roles) as (http, engines), asyncio.timeout(SOON):
        # A step takes 50 ms for 64 tokens: there is time to kill it while it prefills.
        prompt, answer = prompt_of(2000 if while_ == "prefilling" else 1000), Answer()
        first = await ask(http, prompt_of(50), 2)  # the other one is next
        work = asyncio.create_task(ask(http, prompt, 20, answer))
        if while_ == "prefilling":
            await until_running(http)
        else:
            await answer.begun.wait()
        while while_ == "decoding" and len(answer.token_ids) < 5:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        victim = ({"p0", "p1"} - {first.timeline["prefill_engine"]}).pop()
        engines[victim].kill()
        await work
        assert answer.token_ids == expected_tokens(prompt, 20, VOCAB_SIZE)
        assert (answer.timeline["prefill_engine"] == victim) == (while_ != "prefilling")


async def test_a_decode_engine_that_is_killed_while_it_pulls(socket_dir: Path) -> None:
    async with running(socket_dir, {"p0": "prefill", "d0": "decode", "d1": "decode"}) as (http, engines):
        async with asyncio.timeout(SOON):
            first = await ask(http, prompt_of(50), 2)
            prompt, answer = prompt_of(500), Answer()
            work = asyncio.create_task(ask(http, prompt, 20, answer))
            await answer.begun.wait()
            victim = ({"d0", "d1"} - {first.timeline["decode_engine"]}).pop()
            engines[victim].kill()
            await work
        assert answer.token_ids == expected_tokens(prompt, 20, VOCAB_SIZE)
        assert answer.timeline["decode_engine"] == first.timeline["decode_engine"]
