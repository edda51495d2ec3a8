"""Two whole engines, one after the other at each request: fronts, cores, leases, transports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.client.inproc import AsyncInprocClient
from tests.services.engine.kv.kv_fakes import running_coordinator
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.engine_pb2 import AcceptTokens, KVSource
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_PREFILLED

PROMPT = [7 + i % 50 for i in range(333)]


class Pair:
    """A prefill and a decode engine, and a peer of each."""

    def __init__(self, prefill: Peer, decode: Peer, prefill_host: Host, decode_host: Host) -> None:
        self.prefill = prefill
        self.decode = decode
        self._prefill_host = prefill_host
        self._decode_host = decode_host

    async def run(self, slot: int, prompt: list[int], max_tokens: int) -> list[int]:
        """One request in two legs."""
        kv, first = await self.compute(slot, prompt, max_tokens)
        await self.decode.send(make_add(slot, prompt, max_tokens, kv_source=kv, accepted_token_ids=first))
        received = await self.decode.read_until_finished([slot])
        assert received.finished[slot].reason == FINISH_REASON_LENGTH
        return first + received.token_ids[slot]

    async def compute(self, slot: int, prompt: list[int], max_tokens: int) -> tuple[KVSource, list[int]]:
        """The prefill leg."""
        await self.prefill.send(make_add(slot, prompt, max_tokens, hold_kv=True))
        received = await self.prefill.read_until_finished([slot])
        assert received.finished[slot].reason == FINISH_REASON_PREFILLED
        return received.finished[slot].kv, received.token_ids[slot]

    def counted(self, name: str, **labels: str) -> float:
        labels |= {"engine": "decode-0", "model_name": "tokenloom-demo"}
        return self._decode_host.metrics.get_sample_value(f"tokenloom_{name}_total", labels) or 0.0

    async def until_idle(self) -> None:
        """Neither engine holds a block, nor a lease."""
        async with asyncio.timeout(30):
            for host in (self._prefill_host, self._decode_host):
                labels = {"engine": host.settings.instance_id, "model_name": "tokenloom-demo"}
                for gauge in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "tokenloom_kv_leases"):
                    while host.metrics.get_sample_value(gauge, labels):  # noqa: ASYNC110  # the core tells in its time
                        await asyncio.sleep(0.005)

    def num_leases(self) -> float | None:
        labels = {"engine": "prefill-0", "model_name": "tokenloom-demo"}
        return self._prefill_host.metrics.get_sample_value("tokenloom_kv_leases", labels)


def make_engine(settings: EngineSettings, *, own_process: bool) -> EngineService:
    if own_process:
        return EngineService(settings)
    config = settings.engine_config(str(DEMO_MODEL))
    return EngineService(
        settings, AsyncInprocClient(config, UniProcExecutor(HashWorker(config)), make_transports(config.kv.transports))
    )


@asynccontextmanager
async def running_pair(directory: Path, *, own_process: bool = False, **changes: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_coordinator(directory))
        hosts = []
        for role in ("prefill", "decode"):
            settings = make_settings(
                directory,
                instance_id=f"{role}-0",
                role=role,
                listen=f"unix:{directory}/{role}",
                kv_listen=f"unix:{directory}/{role}-kv",
                coordinator=f"unix:{directory}/coordinator",
                kv_checksum=True,
                **{"kv_transports": ["shm"], **changes},
            )
            hosts.append(
                await stack.enter_async_context(running(make_engine(settings, own_process=own_process), settings))
            )
        prefill, decode = [await stack.enter_async_context(Peer(host.address)) for host in hosts]
        yield Pair(prefill, decode, *hosts)


@pytest.mark.parametrize("transport", ["shm", "socket"])
async def test_tokens_are_those_of_one_engine(socket_dir: Path, transport: str) -> None:
    async with running_pair(socket_dir, kv_transports=[transport]) as pair:
        lengths = (1, 3, 4, 5, 64, 333)
        for slot, length in enumerate(lengths, 1):
            prompt = [slot, *PROMPT][:length]  # of which no other is a prefix
            assert await pair.run(slot, prompt, 9) == expected_tokens(prompt, 9, VOCAB_SIZE)
        num_blocks = sum(-(-length // 4) for length in lengths)
        assert pair.counted("kv_transfer_blocks") == num_blocks
        assert pair.counted("kv_transfer_bytes", transport=transport) > 0
        assert not any(pair.counted("kv_recompute", reason=reason) for reason in ("checksum", "timeout", "transport"))


async def test_a_prefix_that_is_here_is_not_moved_again(socket_dir: Path) -> None:
    async with running_pair(socket_dir) as pair:
        await pair.run(1, PROMPT[:40], 5)
        before = pair.counted("kv_transfer_blocks")
        longer = PROMPT[:60]
        assert await pair.run(2, longer, 5) == expected_tokens(longer, 5, VOCAB_SIZE)
        assert 0 < pair.counted("kv_transfer_blocks") - before <= 6


async def test_kv_moves_while_the_prompt_is_computed(socket_dir: Path) -> None:
    async with running_pair(socket_dir, max_num_batched_tokens=32, max_num_seqs=16) as pair:
        await pair.prefill.send(make_add(1, PROMPT, 9, hold_kv=True))
        while (frame := await pair.prefill.read()) is not None and not frame.kv_granted:
            assert not frame.finished
        assert frame is not None
        grant = frame.kv_granted[0]
        await pair.decode.send(make_add(1, PROMPT, 9, kv_source=grant.kv, awaits_tokens=True))
        first = (await pair.prefill.read_until_finished([1])).token_ids[1]
        await pair.decode.send(accept=[AcceptTokens(slot=1, token_ids=first)])
        received = await pair.decode.read_until_finished([1])
        assert first + received.token_ids[1] == expected_tokens(PROMPT, 9, VOCAB_SIZE)
        assert received.finished[1].kv_wait_ns > 0
        assert pair.counted("kv_transfer_blocks") == -(-len(PROMPT) // 4)


async def test_a_lease_is_for_its_own_prompt_and_for_once(socket_dir: Path) -> None:
    async with running_pair(socket_dir) as pair:
        kv, first = await pair.compute(1, PROMPT, 5)
        other = [*PROMPT[:-1], PROMPT[-1] + 1]
        replayed = [make_add(1, other, 5, kv_source=kv, accepted_token_ids=first)]
        replayed += [make_add(slot, PROMPT, 5, kv_source=kv, accepted_token_ids=first) for slot in (2, 3)]
        for add in replayed:
            await pair.decode.send(add)
            received = await pair.decode.read_until_finished([add.slot])
            prompt = list(add.prompt.token_ids)
            if prompt == PROMPT:
                assert first + received.token_ids[add.slot] == expected_tokens(PROMPT, 5, VOCAB_SIZE)
        assert pair.counted("kv_recompute", reason="digest") == 1
        assert pair.counted("kv_recompute", reason="not_found") == 1


async def test_many_at_once(socket_dir: Path) -> None:
    async with running_pair(socket_dir) as pair:
        prompts = {slot: [slot, *PROMPT[: 10 * slot]] for slot in range(1, 13)}
        await pair.prefill.send(*(make_add(slot, prompt, 7, hold_kv=True) for slot, prompt in prompts.items()))
        done = await pair.prefill.read_until_finished(prompts)
        adds = [
            make_add(slot, prompt, 7, kv_source=done.finished[slot].kv, accepted_token_ids=done.token_ids[slot])
            for slot, prompt in prompts.items()
        ]
        await pair.decode.send(*adds)
        received = await pair.decode.read_until_finished(prompts)
        for slot, prompt in prompts.items():
            assert done.token_ids[slot] + received.token_ids[slot] == expected_tokens(prompt, 7, VOCAB_SIZE)


async def test_what_nobody_fetches_is_given_back(socket_dir: Path) -> None:
    async with running_pair(socket_dir, kv_lease_seconds=600) as pair:
        await pair.compute(1, PROMPT, 5)
        await pair.compute(2, PROMPT[:50], 5)
        assert pair.num_leases() == 2
        await pair.prefill.send(abort_slots=[1])
        async with asyncio.timeout(30):
            while pair.num_leases() != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await pair.prefill.send(abort_slots=[2])
        await pair.until_idle()


async def test_the_time_of_what_nobody_fetches_runs_out(socket_dir: Path) -> None:
    async with running_pair(socket_dir, kv_lease_seconds=0.3) as pair:
        await pair.compute(1, PROMPT, 5)
        await pair.until_idle()


@pytest.mark.parametrize("stage", ["prefill", "granted", "acquired", "decode"])
async def test_aborts_leave_nothing_behind(socket_dir: Path, stage: str) -> None:
    async with running_pair(socket_dir, max_num_batched_tokens=32, max_num_seqs=16) as pair:
        await pair.prefill.send(make_add(1, PROMPT, 400, hold_kv=True))
        if stage != "prefill":
            while (frame := await pair.prefill.read()) is not None and not frame.kv_granted:
                pass
            assert frame is not None
            add = make_add(1, PROMPT, 400, kv_source=frame.kv_granted[0].kv, awaits_tokens=True)
            await pair.decode.send(add)
        if stage == "decode":
            first = (await pair.prefill.read_until_finished([1])).token_ids[1]
            await pair.decode.send(accept=[AcceptTokens(slot=1, token_ids=first)])
            await pair.decode.read_tokens()
        if stage == "acquired":
            async with asyncio.timeout(30):
                while not pair.counted("kv_transfer_blocks"):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        await pair.prefill.send(abort_slots=[1])
        await pair.prefill.read_until_finished([1])
        if stage != "prefill":
            await pair.decode.send(abort_slots=[1])
            await pair.decode.read_until_finished([1])
        await pair.until_idle()


async def test_cores_in_processes_of_their_own(socket_dir: Path) -> None:
    async with running_pair(socket_dir, own_process=True, kv_transports=["auto"]) as pair:
        tokens = [await pair.run(slot, [slot, *PROMPT], 6) for slot in (1, 2)]
        assert tokens == [expected_tokens([slot, *PROMPT], 6, VOCAB_SIZE) for slot in (1, 2)]
        assert pair.counted("kv_transfer_bytes", transport="shm") > 0
        kv, first = await pair.compute(3, PROMPT, 5)
        await pair.prefill.send(abort_slots=[3])  # the lease may be gone or not: the tokens are the same
        await pair.decode.send(make_add(3, PROMPT, 5, kv_source=kv, accepted_token_ids=first))
        received = await pair.decode.read_until_finished([3])
        assert first + received.token_ids[3] == expected_tokens(PROMPT, 5, VOCAB_SIZE)
