"""Requests go on at another engine while they generate: their clients notice nothing, and nothing leaks."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import MODEL, VOCAB_SIZE
from tests.mesh.split import SplitEngine, SplitMesh
from tests.parity.reference import add_demo_tokenizer
from tests.parity.state_checkpoints import make_model
from tests.ready_channel import ready_channel
from tokenloom.model_files.model_path import DEMO_ADAPTERS
from tokenloom.services.coordinator.engines import rebalancing
from tokenloom.services.engine.records import load
from tokenloom.v1.engine_pb2 import PAUSE_MODE_KEEP, PauseRequest, ResumeRequest, SetRoleRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_PREFILL

ADMIN = {"authorization": "Bearer root"}
KEYS = {"api_key": ("user",), "admin_api_key": ("root",)}
STEP = {"hash_step_seconds": 0.01}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(VOCAB_SIZE), k=length)


@asynccontextmanager
async def moving_mesh(
    directory: Path,
    engines: int = 2,
    roles: Sequence[str] = (),
    common: dict[str, Any] | None = None,
    coordinator: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[SplitMesh, "Users"]]:
    roles = roles or ("both",) * engines
    mesh = SplitMesh(
        directory, roles, gateway=KEYS, engine={**STEP, **settings}, common=common, coordinator=coordinator
    )
    async with mesh.running(), mesh.http() as http:
        yield mesh, Users(mesh, http)


class Users:
    """Clients and an operator."""

    def __init__(self, mesh: SplitMesh, http: httpx.AsyncClient) -> None:
        self.mesh = mesh
        self.http = http
        http.headers["authorization"] = "Bearer user"

    @asynccontextmanager
    async def asking(self, prompt: list[int], max_tokens: int, **fields: Any) -> AsyncIterator[Answer]:
        """A client that goes away when the block is left."""
        answer = Answer()
        task = asyncio.create_task(ask(self.http, prompt, max_tokens, answer, **fields))
        try:
            yield answer
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def move(self, **query: str) -> httpx.Response:
        return await self.http.post("/move_requests", params=query, headers=ADMIN)

    async def until(self, holds: Callable[[], object]) -> None:
        await self.mesh.engines[0].until(lambda _: holds())

    def owner(self) -> SplitEngine:
        """The engine that runs the only request."""
        [engine] = [each for each in self.mesh.engines if each.is_alive and each.core.scheduler.running]
        return engine

    async def move_away(self, answer: Answer, at: int) -> dict[str, Any]:
        """Moves the only request when it has so many tokens, and returns what the operator hears."""
        await self.until(lambda: len(answer.token_ids) >= at)
        source = self.owner()
        [target] = [each.name for each in self.mesh.engines if each is not source]
        response = await self.move(source=source.name, target=target)
        assert response.status_code == 200, response.text
        outcome: dict[str, Any] = response.json()
        return outcome


MOVED = {"moved": 1, "ended": 0, "stayed": 0, "reasons": []}


@pytest.mark.parametrize("transport", ["shm", "socket"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5}])
async def test_a_request_moves_three_times(socket_dir: Path, transport: str, fields: dict[str, Any]) -> None:
    async with moving_mesh(socket_dir, kv_transports=(transport,)) as (mesh, users):
        prompt = prompt_of(100)
        still = await ask(users.http, prompt, 90, **fields)
        async with users.asking(prompt, 90, **fields) as answer:
            for at in (2, 30, 55):
                assert await users.move_away(answer, at) == MOVED
            await users.until(lambda: answer.finish_reason)
        assert answer.token_ids == still.token_ids
        assert answer.logprobs == still.logprobs
        assert answer.timeline["moves"] == 3
        if not fields:
            assert answer.token_ids == mesh.expected(prompt, 90)
        assert sum(engine.stats.kv_blocks_received for engine in mesh.engines) > 0
        assert not any(engine.recomputes() for engine in mesh.engines)
        await mesh.check_nothing_is_left()


async def test_one_answer_is_named_with_all_of_its_choices(socket_dir: Path) -> None:
    async with moving_mesh(socket_dir) as (mesh, users):
        prompt, name = prompt_of(40), ""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 80, "n": 3, "stream": True, "ignore_eos": True}
        async with users.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if name := line.partition('"id":"')[2].partition('"')[0]:
                    break
            await users.until(lambda: len(users.owner().core.scheduler.running) == 3)
            await users.until(lambda: all(each.num_output_tokens > 2 for each in users.owner().core.scheduler.running))
            source = users.owner()
            outcome = (await users.move(request_id=name)).json()
            assert outcome == {**MOVED, "moved": 3}
            await users.until(lambda: any(each.core.scheduler.running for each in mesh.engines))
            assert users.owner() is not source
            async for _ in lines:
                pass
        await mesh.check_nothing_is_left()


async def test_what_cannot_be_moved_is_said(socket_dir: Path) -> None:
    async with moving_mesh(socket_dir) as (mesh, users):
        for query, status, words in (
            ({}, 400, "name either"),
            ({"source": "engine-7"}, 404, "engine-7 is no engine"),
            ({"source": "engine-0", "target": "engine-7"}, 404, "engine-7 is no engine"),
            ({"request_id": "abc"}, 400, "the id of an answer"),
            ({"request_id": f"cmpl-{'0' * 40}"}, 404, "no engine runs request"),
        ):
            response = await users.move(**query)
            assert (response.status_code, words in response.json()["error"]["message"]) == (status, True), response.text
        assert (await users.http.post("/move_requests?source=engine-0")).status_code == 401
        async with users.asking(prompt_of(30), 40) as answer:
            await users.until(lambda: len(answer.token_ids) > 3)
            source = users.owner()
            outcome = (await users.move(source=source.name, target=source.name)).json()
            assert (outcome["moved"], outcome["stayed"]) == (0, 1)
            assert outcome["reasons"] == [f"{source.name}: it runs here already"]
            [other] = [each for each in mesh.engines if each is not source]
            assert (await users.move(source=other.name, target=other.name)).json() == {**MOVED, "moved": 0}
            await users.until(lambda: len(answer.token_ids) > 34)
            outcome = (await users.move(source=source.name)).json()
            assert outcome["reasons"] in ([], [f"{source.name}: it ends within a few tokens"])
            await users.until(lambda: answer.finish_reason)
        assert answer.token_ids == mesh.expected(prompt_of(30), 40)
        assert "moves" not in answer.timeline
        await mesh.check_nothing_is_left()


async def test_many_that_stay_all_stay(socket_dir: Path) -> None:
    """More than the steps that each of them goes on for until it leaves."""
    async with moving_mesh(socket_dir, engines=1, max_num_seqs=32) as (mesh, users):
        prompts = [prompt_of(30, seed) for seed in range(24)]
        answers = [Answer() for _ in prompts]
        tasks = [
            asyncio.create_task(ask(users.http, prompt, 120, answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        await users.until(lambda: all(len(answer.token_ids) > 3 for answer in answers))
        outcome = (await users.move(source="engine-0")).json()
        assert (outcome["moved"], outcome["ended"] + outcome["stayed"]) == (0, 24)
        assert "engine-0: no other engine took it, or its blocks were needed" in outcome["reasons"]
        await asyncio.gather(*tasks)
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, 120) for prompt in prompts]
        assert not any("moves" in answer.timeline for answer in answers)
        await mesh.check_nothing_is_left()


async def test_engines_that_serve_no_kv_move_nothing(socket_dir: Path) -> None:
    async with (
        moving_mesh(socket_dir, kv_transports=(), kv_listen="") as (_, users),
        users.asking(prompt_of(30), 60) as answer,
    ):
        await users.until(lambda: len(answer.token_ids) > 3)
        response = await users.move(source=users.owner().name)
        assert (response.status_code, "--kv-transports" in response.json()["error"]["message"]) == (400, True)


async def test_a_drain_moves_what_runs(socket_dir: Path) -> None:
    common = {"drain_timeout": 30.0}
    async with moving_mesh(socket_dir, common=common, drain="migrate", max_num_seqs=4) as (mesh, users):
        prompts = [prompt_of(50, seed) for seed in range(7)]
        answers = [Answer() for _ in prompts]
        tasks = [
            asyncio.create_task(ask(users.http, prompt, 80, answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        await users.until(lambda: sum(len(answer.token_ids) > 3 for answer in answers) >= 6)
        leaving = mesh.engines[0]
        await leaving.stop()
        leaving.is_alive = False
        await asyncio.gather(*tasks)
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, 80) for prompt in prompts]
        assert sum("moves" in answer.timeline for answer in answers) >= 2
        assert mesh.engines[1].stats.kv_blocks_received > 0
        await mesh.check_nothing_is_left()


async def test_decode_engines_hand_requests_to_each_other(socket_dir: Path) -> None:
    async with moving_mesh(socket_dir, roles=("prefill", "decode", "decode")) as (mesh, users):
        prompt = prompt_of(200)
        async with users.asking(prompt, 90) as answer:
            for at in (3, 30, 55):
                await users.until(lambda at=at: len(answer.token_ids) >= at)
                assert (await users.move(source=users.owner().name)).json() == MOVED
            await users.until(lambda: answer.finish_reason)
        assert answer.token_ids == mesh.expected(prompt, 90)
        assert answer.timeline["moves"] == 3
        assert answer.timeline["prefill_engine"] == "engine-0"
        assert not any(engine.recomputes() for engine in mesh.engines)
        await mesh.check_nothing_is_left()


async def test_an_engine_that_is_to_prefill_hands_over_what_it_decodes(socket_dir: Path) -> None:
    async with moving_mesh(socket_dir) as (mesh, users):
        async with users.asking(prompt_of(50), 90) as answer:
            await users.until(lambda: len(answer.token_ids) > 3)
            source = users.owner()
            async with ready_channel(mesh.address(source.name)) as channel:
                await EngineAdminStub(channel).SetRole(SetRoleRequest(role=ENGINE_ROLE_PREFILL))
            assert not source.core.scheduler.running
            await users.until(lambda: answer.finish_reason)
        assert answer.token_ids == mesh.expected(prompt_of(50), 90)
        assert answer.timeline["moves"] == 1
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("stage", ["granted", "copying", "handed over"])
async def test_either_engine_dies_while_a_request_moves(socket_dir: Path, victim: str, stage: str) -> None:
    settings = {"failpoints": ("slow_copy",)} if stage == "copying" else {}
    async with moving_mesh(socket_dir, 3, **settings) as (mesh, users):
        prompt = prompt_of(200)
        async with users.asking(prompt, 90) as answer:
            await users.until(lambda: len(answer.token_ids) > 5)
            source = users.owner()
            target = next(each for each in mesh.engines if each is not source)
            move = asyncio.create_task(users.move(source=source.name, target=target.name))
            if stage == "granted":
                await users.until(lambda: source.stats.num_leases)
            elif stage == "copying":
                await users.until(lambda: target.core.scheduler.requests)
            else:
                await users.until(lambda: not source.core.scheduler.running)
            await (source if victim == "source" else target).kill()
            await asyncio.wait([move])
            await users.until(lambda: answer.finish_reason or answer.error)
        assert answer.token_ids == mesh.expected(prompt, 90)
        await mesh.check_nothing_is_left()


async def test_a_client_that_goes_away_while_its_request_moves(socket_dir: Path) -> None:
    async with moving_mesh(socket_dir, failpoints=("slow_copy",), kv_lease_seconds=600.0) as (mesh, users):
        async with users.asking(prompt_of(200), 200) as answer:
            await users.until(lambda: len(answer.token_ids) > 5)
            source = users.owner()
            move = asyncio.create_task(users.move(source=source.name))
            await users.until(lambda: source.stats.num_leases)
        await mesh.check_nothing_is_left()
        assert (await move).json()["ended"] == 1


@asynccontextmanager
async def one_has_all(
    directory: Path, count: int, max_tokens: int, **settings: Any
) -> AsyncIterator[tuple[SplitEngine, SplitEngine]]:
    """Two engines, of which one runs as many requests of 50 tokens, and the other one none. Checks their answers."""
    prompts, answers = [prompt_of(50, seed) for seed in range(count)], [Answer() for _ in range(count)]
    async with moving_mesh(directory, **settings) as (mesh, users):
        busy, idle = mesh.engines
        async with ready_channel(mesh.address(idle.name)) as channel:
            await EngineAdminStub(channel).Pause(PauseRequest(mode=PAUSE_MODE_KEEP))
            await users.until(lambda: idle.name not in mesh.known())
            tasks = [
                asyncio.create_task(ask(users.http, prompt, max_tokens, answer))
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            await users.until(lambda: len(busy.core.scheduler.running) == count)
            await EngineAdminStub(channel).Resume(ResumeRequest())
        yield busy, idle
        await asyncio.gather(*tasks)
        assert [answer.token_ids for answer in answers] == [mesh.expected(prompt, max_tokens) for prompt in prompts]
        await mesh.check_nothing_is_left()


async def test_requests_leave_a_hot_engine(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancing, "HOT_SECONDS", 0.1)
    monkeypatch.setattr(rebalancing, "APART_SECONDS", 0.3)
    async with one_has_all(socket_dir, 12, 300, coordinator={"rebalance": 1.5}) as (busy, idle):
        await idle.until(lambda engine: engine.core.scheduler.running)
        while len(busy.core.scheduler.running) + len(idle.core.scheduler.running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert 1 <= busy.moves()["rebalance"] <= 6, "half of them at most"
        assert not idle.moves(), "none came back"
        assert not idle.recomputes()


SCARCE: dict[str, Any] = {"num_kv_blocks": 70, "max_model_len": 512, "hash_step_seconds": 0.02}
"""For 6 requests of 230 tokens, or 15 blocks each in the end."""


async def test_what_would_be_preempted_moves_to_an_engine_with_room(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "RELIEF_SECONDS", 3.0)  # a busy machine takes longer to move one
    async with one_has_all(socket_dir, 6, 180, move_before_preemption=True, **SCARCE) as (busy, idle):
        await idle.until(lambda engine: engine.core.scheduler.running)
        await busy.until(lambda engine: engine.moves().get("preemption"))
        assert not idle.recomputes()


async def test_without_the_option_it_is_preempted(socket_dir: Path) -> None:
    async with one_has_all(socket_dir, 6, 180, **SCARCE) as (busy, _):
        await busy.until(lambda engine: engine.stats.num_preemptions)
        assert not busy.moves()


async def test_what_cannot_leave_in_time_is_preempted(socket_dir: Path) -> None:
    """No engine reaches its KV any more, so the other one computes it again, or the owner does."""
    async with one_has_all(socket_dir, 6, 180, move_before_preemption=True, **SCARCE) as (busy, _):
        await busy.cut_kv()
        await busy.until(lambda engine: engine.moves() or engine.stats.num_preemptions)


COUNT = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 30}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "log probabilities": {"logprobs": 3},
    "prompt log probabilities": {"prompt_logprobs": 1, "logprobs": 1},
    "samples": {"n": 3, "temperature": 1.0, "seed": 5},
    "bias": {"logit_bias": {"17": 3.0, "99": -100}, "temperature": 1.0, "seed": 2},
    "minimum": {"min_tokens": 50, "ignore_eos": False},
    "schema": {"structured_outputs": {"json": COUNT}, "temperature": 1.0, "seed": 9, "ignore_eos": False},
    "prompts": {"prompt": [prompt_of(20, 1), prompt_of(90, 2)]},
    "echo": {"echo": True},
}
SHOWN = ("text", "token_ids", "logprobs", "prompt_logprobs", "finish_reason", "stop_reason")


MOST_ROUNDS = 20


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """What a client sees of an answer, by index; and how often its outputs moved."""
    body = {"model": MODEL, "prompt": prompt_of(70, 3), "max_tokens": 70, "temperature": 0, "ignore_eos": True}
    extras = {"return_token_ids": True, "return_timeline": True}
    response = await http.post("/v1/completions", json={**body, **extras, **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = {choice["index"]: {name: choice.get(name) for name in SHOWN} for choice in answer["choices"]}
    return {"choices": choices, "moves": answer["timeline"].get("moves", 0)}


async def check_all_kinds(users: Users, kinds: dict[str, dict[str, Any]]) -> int:
    """Asks for all kinds, and again while they move all the time, until each has moved. Returns the moves."""
    still = await asyncio.gather(*(complete(users.http, **fields) for fields in kinds.values()))
    expected, num_moves = dict(zip(kinds, still, strict=True)), dict.fromkeys(kinds, 0)
    for _ in range(MOST_ROUNDS):  # a busy machine may let a short one end before it is asked to move
        if not (left := [name for name in kinds if not num_moves[name]]):
            return sum(num_moves.values())
        asked = {name: asyncio.create_task(complete(users.http, **kinds[name])) for name in left}
        while not all(task.done() for task in asked.values()):
            for engine in users.mesh.engines:
                assert (await users.move(source=engine.name)).status_code == 200
        for name, task in asked.items():
            assert task.result()["choices"] == expected[name]["choices"], name
            num_moves[name] += task.result()["moves"]
    raise AssertionError(f"some never moved: {num_moves}")


async def test_every_kind_of_request_moves(socket_dir: Path) -> None:
    async with moving_mesh(socket_dir, max_num_seqs=32) as (mesh, users):
        text = (await complete(users.http))["choices"][0]["text"]
        kinds = {**KINDS, "stop": {"stop": [text[-12:-9]]}}
        assert await check_all_kinds(users, kinds) >= len(kinds)
        assert not any(engine.recomputes() for engine in mesh.engines)
        await mesh.check_nothing_is_left()


REAL = {"worker": "model", "max_model_len": 512, "num_kv_blocks": 200}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapping steps": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
}


@pytest.mark.parametrize("feature", FEATURES)
async def test_kv_of_a_real_model_moves(socket_dir: Path, feature: str) -> None:
    async with moving_mesh(socket_dir, **REAL, **FEATURES[feature]) as (mesh, users):
        kinds = {name: KINDS[name] for name in ("greedy", "seeded", "penalties", "samples", "schema")}
        await check_all_kinds(users, kinds)
        assert not any(engine.recomputes() for engine in mesh.engines)
        assert sum(engine.stats.kv_blocks_received for engine in mesh.engines) > 10
        await mesh.check_nothing_is_left()


async def test_requests_move_with_their_adapters(socket_dir: Path) -> None:
    modules = tuple(f"{name}={DEMO_ADAPTERS / name}" for name in ("json", "pirate"))
    adapters = {"enable_lora": True, "max_loras": 2, "lora_modules": modules}
    async with moving_mesh(socket_dir, **REAL, **adapters) as (mesh, users):
        names = (MODEL, "json", "pirate")
        kinds = {name: {"model": name, "prompt": "What is a KV block?"} for name in names}
        await check_all_kinds(users, kinds)
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2"])
async def test_states_of_a_real_model_move(kind: str, socket_dir: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = await asyncio.to_thread(make_model, kind, vocab_size=503)
    await asyncio.to_thread(model.save_pretrained, tmp_path)
    engine = {"worker": "model", "model": str(add_demo_tokenizer(tmp_path)), "served_model_name": MODEL}
    async with moving_mesh(socket_dir, **engine, max_model_len=256, num_kv_blocks=64) as (mesh, users):
        prompts = {str(length): {"prompt": list(range(7, 7 + length))} for length in (3, 40, 80)}
        seeded = {f"{name} seeded": {**fields, "temperature": 1.0, "seed": 4} for name, fields in prompts.items()}
        await check_all_kinds(users, prompts | seeded)
        assert not any(engine.recomputes() for engine in mesh.engines)
        await mesh.check_nothing_is_left()
