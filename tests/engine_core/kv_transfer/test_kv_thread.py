"""KV moves between cores in processes, and on threads, of their own; the KV thread answers while a step runs."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.engine_core.client.inproc import AsyncInprocClient
from tests.engine_core.helpers import make_config, make_request
from tokenloom.engine_core.client.async_core_client import AsyncCoreClient, AsyncMPClient
from tokenloom.engine_core.data.config import EngineConfig, KVConfig
from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVAnswer, KVCall, KVRelease, KVTarget, KVVerdict, KVVerify
from tokenloom.engine_core.data.messages import EngineCoreOutput, FinishReason
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import DEFAULT_VOCAB_SIZE, HashWorker, expected_tokens
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports
from tokenloom.services.engine.core.workers import CORE_COMMAND

LEASE_ID = b"0123456789abcdef"
PROMPT = list(range(100))
MakeClient = Callable[[EngineConfig], AsyncCoreClient]
GATED_CORE = """
import argparse, os, pathlib, time
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.process.core_process import run_engine_core
from tokenloom.services.engine.core.core_main import make_transports

class GatedWorker(HashWorker):
    def execute_model(self, scheduler_output):
        began.touch()
        while not gate.exists():
            time.sleep(0.005)
        super().execute_model(scheduler_output)

began, gate = pathlib.Path({began!r}), pathlib.Path({gate!r})
parser = argparse.ArgumentParser()
parser.add_argument("--handshake")
handshake = parser.parse_known_args()[0].handshake
os._exit(run_engine_core(handshake, lambda config: UniProcExecutor(GatedWorker(config)), make_transports))
"""
"""A core whose first step waits until the test lets it go on."""


def kv_config(transport: str) -> EngineConfig:
    return msgspec.structs.replace(make_config(), kv=KVConfig(transports=(transport,), checksum=True))


@pytest.mark.parametrize(
    ("transport", "checksum", "count"),
    [("shm", None, 0), ("shm", True, 25), ("socket", None, 25), ("socket", False, 0)],
)
async def test_what_goes_through_memory_is_compared_by_choice(
    transport: str, checksum: bool | None, count: int
) -> None:
    config = kv_config(transport)
    owner = in_thread(msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, checksum=checksum)))
    async with started(owner) as layout:
        _, target = await prefill(owner, layout, transport)
        answer = await call(owner, KVRelease(2, target.acquisition_id, target.generations))
        assert (answer.valid, len(answer.checksums)) == (True, count)


def in_process(config: EngineConfig) -> AsyncCoreClient:
    return AsyncMPClient(config, CORE_COMMAND)


def in_thread(config: EngineConfig) -> AsyncCoreClient:
    return AsyncInprocClient(config, UniProcExecutor(HashWorker(config)), make_transports(config.kv.transports))


@asynccontextmanager
async def started(client: AsyncCoreClient) -> AsyncIterator[str]:
    """The core's KV layout."""
    async with asyncio.timeout(60):
        ready = await client.start()
        try:
            yield ready.kv_layout
        finally:
            await client.close()


async def call(client: AsyncCoreClient, message: KVCall) -> KVAnswer:
    await client.kv_send(message)
    event = await client.kv_receive()
    assert isinstance(event, KVAnswer)
    return event


async def outputs_of(client: AsyncCoreClient) -> list[EngineCoreOutput]:
    """Of the one request, until it ends."""
    outputs: list[EngineCoreOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += (await client.get_output()).outputs
    return outputs


async def prefill(client: AsyncCoreClient, layout: str, transport: str) -> tuple[list[int], KVTarget]:
    """The first token, and where the KV is."""
    request = make_request("a", PROMPT)
    request.lease_id = LEASE_ID
    await client.add_request(request)
    last = (await outputs_of(client))[-1]
    assert last.finish_reason is FinishReason.PREFILLED
    answer = await call(client, KVAcquire(1, LEASE_ID, layout, prompt_digest(PROMPT, b""), [transport]))
    assert answer.target is not None
    return last.new_token_ids, answer.target


async def settle_verdict(owner: AsyncCoreClient, reader: AsyncCoreClient, target: KVTarget) -> None:
    """What the two fronts do about a load."""
    event = await reader.kv_receive()
    assert event == KVVerify("a", copied=True)
    answer = await call(owner, KVRelease(2, target.acquisition_id, target.generations))
    assert answer.valid
    assert len(answer.checksums) == 25
    repeated = await call(owner, KVRelease(3, target.acquisition_id, target.generations))
    assert (repeated.valid, repeated.checksums) == (True, answer.checksums), "as if the first answer had been lost"
    await reader.kv_send(KVVerdict("a", valid=True, checksums=answer.checksums))


@pytest.mark.parametrize("make_client", [in_process, in_thread])
@pytest.mark.parametrize("transport", ["shm", "socket"])
async def test_blocks_are_pulled_from_another_core(make_client: MakeClient, transport: str) -> None:
    config = kv_config(transport)
    owner, reader = make_client(config), make_client(config)
    async with started(owner) as layout, started(reader):
        first, target = await prefill(owner, layout, transport)
        request = make_request("a", PROMPT, accepted=first)
        request.remote_kv = target
        await reader.add_request(request)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(settle_verdict(owner, reader, target))
            outputs = await outputs_of(reader)
        tokens = first + [token_id for output in outputs for token_id in output.new_token_ids]
        assert tokens == expected_tokens(PROMPT, 5, DEFAULT_VOCAB_SIZE)
        assert outputs[0].prefill_stats is not None
        assert outputs[0].prefill_stats.num_cached_tokens == len(PROMPT)
        assert outputs[0].kv_wait_ns > 0


async def test_calls_are_answered_while_a_step_runs(tmp_path: Path) -> None:
    began, gate, script = tmp_path / "began", tmp_path / "gate", tmp_path / "core.py"
    script.write_text(GATED_CORE.format(began=str(began), gate=str(gate)))
    client = AsyncMPClient(kv_config("shm"), [sys.executable, str(script)])
    async with started(client) as layout:
        await client.add_request(make_request("a", PROMPT, max_tokens=1))
        outputs = asyncio.ensure_future(outputs_of(client))
        while not began.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        message = KVAcquire(1, LEASE_ID, layout, prompt_digest(PROMPT, b""), ["shm"])
        for _ in range(20):
            assert (await call(client, message)).failure == "not_found"
        assert not outputs.done()
        gate.touch()
        assert (await outputs)[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("make_client", [in_process, in_thread])
async def test_a_lease_runs_out_while_the_core_is_idle(make_client: MakeClient) -> None:
    config = kv_config("shm")
    kv = msgspec.structs.replace(config.kv, lease_seconds=1.0)
    client = make_client(msgspec.structs.replace(config, kv=kv))
    async with started(client):
        request = make_request("a", PROMPT)
        request.lease_id = LEASE_ID
        await client.add_request(request)
        num_leases = []
        while num_leases[-2:] != [1, 0]:
            stats = (await client.get_output()).scheduler_stats
            assert stats is not None
            num_leases.append(stats.num_leases)
        assert stats.kv_usage == 0.0


@pytest.mark.parametrize("make_client", [in_process, in_thread])
async def test_who_waits_for_the_kv_thread_hears_that_the_core_is_gone(make_client: MakeClient) -> None:
    client = make_client(kv_config("shm"))
    async with started(client):
        waiting = asyncio.ensure_future(client.kv_receive())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(EngineDeadError):
            await waiting
        with pytest.raises(EngineDeadError):
            await client.kv_send(KVVerdict("a", valid=False))
