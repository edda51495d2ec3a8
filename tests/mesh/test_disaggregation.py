"""Prefill here, decode there: whatever happens on the way, the tokens are those of one engine, and nothing leaks."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import VOCAB_SIZE
from tests.mesh.split import SplitEngine, SplitMesh
from tokenloom.engine_core.data.request import RequestStatus

BLOCK = 16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 512, 1000, 1999, 2000)
"""Of prompts: block-aligned and not, in one step and in several."""
SLOW_PREFILL = {"hash_step_seconds": 0.01, "max_num_batched_tokens": 64}
SMALL = {"max_model_len": 256}
SLOW_COPY = {"failpoints": ("slow_copy",)}
NEVER_EXPIRE = {"kv_lease_seconds": 600.0}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(VOCAB_SIZE), k=length)


def num_blocks(*lengths: int) -> int:
    return sum(-(-length // BLOCK) for length in lengths)


@asynccontextmanager
async def asking(http: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> AsyncIterator[Answer]:
    """A client that goes away when the block is left."""
    answer = Answer()
    task = asyncio.create_task(ask(http, prompt, max_tokens, answer))
    try:
        yield answer
    finally:
        task.cancel()
        await asyncio.wait([task])


def is_pulling(engine: SplitEngine) -> bool:
    return any(
        request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        for request in list(engine.core.scheduler.requests.values())
    )


def is_prefilling(engine: SplitEngine) -> bool:
    return any(0 < r.kv.num_computed_tokens < r.num_tokens for r in list(engine.core.scheduler.requests.values()))


@pytest.mark.parametrize("transport", ["shm", "socket"])
async def test_prompts_of_every_length(socket_dir: Path, transport: str) -> None:
    async with SplitMesh(socket_dir, engine={"kv_transports": (transport,)}).running() as mesh, mesh.http() as http:
        for length in LENGTHS:
            answer = await ask(http, prompt_of(length), 20)
            assert answer.token_ids == mesh.expected(prompt_of(length), 20), length
            assert answer.timeline["prefill_engine"] == mesh.of_role("prefill").name
            assert answer.timeline["decode_engine"] == mesh.of_role("decode").name
        stats = mesh.of_role("decode").stats
        assert stats.kv_blocks_received == num_blocks(*LENGTHS)
        assert set(stats.kv_bytes_received) == {transport}
        assert not mesh.of_role("decode").recomputes()
        await mesh.check_nothing_is_left()


async def test_one_token_needs_no_decode_engine(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        answer = await ask(http, prompt_of(100), 1)
        assert answer.token_ids == mesh.expected(prompt_of(100), 1)
        assert answer.finish_reason == "length"
        assert mesh.of_role("decode").stats.kv_blocks_received == 0
        await mesh.check_nothing_is_left()


async def test_what_the_decode_engine_has_does_not_move_again(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        decode = mesh.of_role("decode")
        received = []
        for prompt in (prompt_of(100), prompt_of(100), prompt_of(100) + prompt_of(50)):
            answer = await ask(http, prompt, 4)
            assert answer.token_ids == mesh.expected(prompt, 4)
            received.append(decode.stats.kv_blocks_received)
        # The seventh block of the first prompt is not full: nobody can find it by its content.
        assert received == [7, 7 + 1, 7 + 1 + num_blocks(150) - 6]
        await mesh.check_nothing_is_left()


async def test_a_prompt_that_is_there_in_full_does_not_move_at_all(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        for _ in range(2):
            answer = await ask(http, prompt_of(6 * BLOCK), 4)
            assert answer.token_ids == mesh.expected(prompt_of(6 * BLOCK), 4)
        assert mesh.of_role("decode").stats.kv_blocks_received == 6
        await mesh.check_nothing_is_left()


async def test_a_prefix_that_only_the_prefill_engine_has(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        await ask(http, prompt_of(100), 1)
        prompt = prompt_of(100) + prompt_of(30)
        answer = await ask(http, prompt, 6)
        assert answer.token_ids == mesh.expected(prompt, 6)
        assert mesh.of_role("prefill").stats.prefix_cache_hits == 96
        assert mesh.of_role("decode").stats.kv_blocks_received == num_blocks(130)
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize("transport", ["shm", "socket"])
async def test_many_requests_at_once(socket_dir: Path, transport: str) -> None:
    roles = ("prefill", "prefill", "decode", "decode")
    engine = {"kv_transports": (transport,), "hash_step_seconds": 0.001}
    async with SplitMesh(socket_dir, roles, engine=engine).running() as mesh, mesh.http() as http:
        shapes = [(prompt_of(17 * i % 600 + 1, seed=i % 3), i % 7 * 5 + 2) for i in range(32)]
        answers = await asyncio.gather(*(ask(http, prompt, count) for prompt, count in shapes))
        for (prompt, count), answer in zip(shapes, answers, strict=True):
            assert answer.token_ids == mesh.expected(prompt, count)
        assert {answer.timeline["decode_engine"] for answer in answers} == {"engine-2", "engine-3"}
        assert {answer.timeline["prefill_engine"] for answer in answers} == {"engine-0", "engine-1"}
        assert not any(engine.recomputes() for engine in mesh.engines)
        await mesh.check_nothing_is_left()


async def test_preemption_on_the_decode_engine(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir, engine=SMALL, decode={"num_kv_blocks": 24}).running() as mesh, mesh.http() as http:
        prompts = [prompt_of(60, seed) for seed in range(8)]
        answers = await asyncio.gather(*(ask(http, prompt, 60) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, 60) for prompt in prompts]
        assert mesh.of_role("decode").stats.num_preemptions
        await mesh.check_nothing_is_left()


async def test_leases_yield_to_prompts_that_need_the_room(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, engine=SMALL, prefill={"num_kv_blocks": 30, **NEVER_EXPIRE}, decode=SLOW_COPY)
    async with mesh.running(), mesh.http() as http:
        prompts = [prompt_of(200, seed) for seed in range(8)]
        answers = await asyncio.gather(*(ask(http, prompt, 10) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, 10) for prompt in prompts]
        await mesh.check_nothing_is_left()


async def test_blocks_move_while_the_prompt_is_computed(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, prefill=SLOW_PREFILL)
    async with mesh.running(), mesh.http() as http, asking(http, prompt_of(1000), 8) as answer:
        await mesh.of_role("decode").until(is_pulling)
        assert not answer.begun.is_set()
        await mesh.of_role("decode").until(lambda engine: answer.finish_reason)
        assert answer.token_ids == mesh.expected(prompt_of(1000), 8)
        assert mesh.of_role("decode").stats.kv_blocks_received == num_blocks(1000)
    await mesh.check_nothing_is_left()


ABORTS: dict[str, Callable[[SplitMesh, Answer], bool]] = {
    "waiting": lambda mesh, answer: bool(mesh.of_role("prefill").core.scheduler.requests),
    "prefilling": lambda mesh, answer: is_prefilling(mesh.of_role("prefill")),
    "granted": lambda mesh, answer: mesh.of_role("prefill").stats.num_leases == 1,
    "pulling": lambda mesh, answer: is_pulling(mesh.of_role("decode")),
    "handed over": lambda mesh, answer: answer.begun.is_set(),
    "decoding": lambda mesh, answer: len(answer.token_ids) > 2,
}


@pytest.mark.parametrize("stage", ABORTS)
@pytest.mark.parametrize("length", [40, 600])
async def test_a_client_that_goes_away(socket_dir: Path, stage: str, length: int) -> None:
    """Leases would live on for ten minutes: it is not their end that frees the blocks."""
    engine = {**NEVER_EXPIRE, **SLOW_PREFILL}
    async with SplitMesh(socket_dir, engine=engine, decode=SLOW_COPY).running() as mesh, mesh.http() as http:
        async with asking(http, prompt_of(length), 200) as answer:
            if (stage, length) == ("prefilling", 40):
                return  # done in one step
            await mesh.of_role("decode").until(lambda _: ABORTS[stage](mesh, answer))
        await mesh.check_nothing_is_left()
        answer = await ask(http, prompt_of(length), 4)
        assert answer.token_ids == mesh.expected(prompt_of(length), 4)


async def test_a_prefill_engine_that_dies_with_a_prompt(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, ("prefill", "prefill", "decode"), prefill=SLOW_PREFILL)
    async with mesh.running(), mesh.http() as http, asking(http, prompt_of(2000), 8) as answer:
        victim = await first(mesh.engines[:2], is_prefilling)
        await mesh.of_role("decode").until(is_pulling)
        await victim.kill()
        await mesh.of_role("decode").until(lambda _: answer.finish_reason or answer.error)
        assert answer.token_ids == mesh.expected(prompt_of(2000), 8)
        assert answer.timeline["prefill_engine"] != victim.name
        await mesh.check_nothing_is_left()


async def test_a_prefill_engine_that_dies_while_its_blocks_are_read(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir, decode=SLOW_COPY).running() as mesh, mesh.http() as http:
        async with asking(http, prompt_of(200), 8) as answer:
            decode = mesh.of_role("decode")
            await decode.until(is_pulling)
            await mesh.of_role("prefill").kill()
            await decode.until(lambda _: answer.finish_reason or answer.error)
            assert answer.token_ids == mesh.expected(prompt_of(200), 8)
            # Whichever notices first: who copies or who renews.
            assert decode.recomputes() in ({"owner_lost": 1}, {"transport": 1})
        await mesh.check_nothing_is_left()


async def test_a_prefill_engine_that_dies_later_is_not_missed(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, decode={"hash_step_seconds": 0.01})
    async with mesh.running(), mesh.http() as http, asking(http, prompt_of(200), 40) as answer:
        decode = mesh.of_role("decode")
        await decode.until(lambda _: len(answer.token_ids) > 2)
        await mesh.of_role("prefill").kill()
        await decode.until(lambda _: answer.finish_reason or answer.error)
        assert answer.token_ids == mesh.expected(prompt_of(200), 40)
        assert not decode.recomputes()
    await mesh.check_nothing_is_left()


async def test_a_decode_engine_that_dies_while_it_pulls(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, ("prefill", "decode", "decode"), engine=NEVER_EXPIRE, decode=SLOW_COPY)
    async with mesh.running(), mesh.http() as http, asking(http, prompt_of(200), 8) as answer:
        victim = await first(mesh.engines[1:], is_pulling)
        await victim.kill()
        rest = [engine for engine in mesh.engines if engine is not victim]
        await rest[0].until(lambda _: answer.finish_reason or answer.error)
        assert answer.token_ids == mesh.expected(prompt_of(200), 8)
        assert answer.timeline["decode_engine"] == rest[-1].name


async def test_the_lease_of_a_dead_decode_engine_runs_out(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, engine={"kv_lease_seconds": 0.3}, decode=SLOW_COPY)
    async with mesh.running(), mesh.http() as http, asking(http, prompt_of(200), 8) as answer:
        prefill, decode = mesh.engines
        await decode.until(is_pulling)
        await decode.kill()
        await prefill.until(lambda _: answer.finish_reason or answer.error)
        assert answer.error or answer.token_ids == mesh.expected(prompt_of(200), 8)
        await mesh.check_nothing_is_left()


async def test_the_prefill_engine_continues_for_a_decode_engine_that_dies_with_output(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, decode={"hash_step_seconds": 0.01})
    async with mesh.running(), mesh.http() as http, asking(http, prompt_of(100), 500) as answer:
        prefill, decode = mesh.engines
        await decode.until(lambda _: len(answer.token_ids) > 3)
        await decode.kill()
        await prefill.until(lambda _: answer.finish_reason)
        assert answer.token_ids == mesh.expected(prompt_of(100), 500)
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_losing_the_last_engine_of_a_role_is_no_outage(socket_dir: Path, lost: str) -> None:
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        await mesh.of_role(lost).kill()
        (left,) = [engine for engine in mesh.engines if engine.role != lost]
        answer = await ask(http, prompt_of(300), 8)
        assert answer.token_ids == mesh.expected(prompt_of(300), 8)
        assert {answer.timeline["prefill_engine"], answer.timeline["decode_engine"]} == {left.name}
        again = mesh.new_engine(lost)
        await again.start()
        await mesh.until_known(left.name, again.name)
        answer = await ask(http, prompt_of(301), 8)
        assert answer.token_ids == mesh.expected(prompt_of(301), 8)
        assert {answer.timeline["prefill_engine"], answer.timeline["decode_engine"]} == {left.name, again.name}
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize(
    ("where", "failpoint", "reason", "engine"),
    [
        ("prefill", "lease_expires", "lease_expired", {}),
        ("prefill", "wrong_layout", "layout", {"kv_lease_seconds": 3.0}),  # which no message ends
        ("decode", "copy_fails", "transport", {}),
        ("decode", "torn_copy", "checksum", {}),
        ("decode", "verdict_lost", "timeout", {"kv_load_timeout": 0.3}),
    ],
)
async def test_a_fault_costs_a_recompute_and_no_token(
    socket_dir: Path, where: str, failpoint: str, reason: str, engine: dict[str, float]
) -> None:
    faulty = {where: {"failpoints": (failpoint,)}}
    async with SplitMesh(socket_dir, engine=engine, **faulty).running() as mesh, mesh.http() as http:
        prompts = [prompt_of(100, seed) for seed in range(3)]
        answers = await asyncio.gather(*(ask(http, prompt, 8) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, 8) for prompt in prompts]
        assert mesh.of_role(where).fired()[failpoint]
        assert set(mesh.of_role("decode").recomputes()) == {reason}
        await mesh.check_nothing_is_left()


async def test_blocks_that_are_reused_while_they_are_read(socket_dir: Path) -> None:
    prefill = {"failpoints": ("blocks_reused",), "num_kv_blocks": 16}
    mesh = SplitMesh(socket_dir, engine=SMALL, prefill=prefill, decode=SLOW_COPY)
    async with mesh.running(), mesh.http() as http:
        prompts = [prompt_of(200, seed) for seed in range(4)]
        answers = await asyncio.gather(*(ask(http, prompt, 8) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, 8) for prompt in prompts]
        assert set(mesh.of_role("decode").recomputes()) == {"generation_changed"}
        await mesh.check_nothing_is_left()


async def test_asking_twice_for_a_verdict_changes_nothing(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, decode={"failpoints": ("verify_twice",)})
    async with mesh.running(), mesh.http() as http:
        answer = await ask(http, prompt_of(100), 8)
        assert answer.token_ids == mesh.expected(prompt_of(100), 8)
        assert mesh.of_role("decode").fired()["verify_twice"]
        assert not mesh.of_role("decode").recomputes()
        await mesh.check_nothing_is_left()


async def first(engines: list[SplitEngine], holds: Callable[[SplitEngine], bool]) -> SplitEngine:
    """The engine of which it first holds."""
    await engines[0].until(lambda _: any(map(holds, engines)))
    return next(engine for engine in engines if holds(engine))
