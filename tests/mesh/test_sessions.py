"""A session returns to the engine that has its KV, although another one has less to do."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON, Mesh
from tests.mesh.test_placement_rules import until
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.engine_pb2 import PAUSE_MODE_KEEP, PauseRequest, ResumeRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

ENGINES = "engine-0", "engine-1"
BLOCK_SIZE, TURNS = 4, (900, 600, 400)
OTHERS = [[9, index] for index in range(5)]
ENGINE = {
    "block_size": BLOCK_SIZE,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "num_kv_blocks": 4096,
    "hash_step_seconds": 0.02,
    "max_num_seqs": 16,
}


class Session:
    """Sends its whole conversation with each turn, as agents do."""

    def __init__(self, http: httpx.AsyncClient, seed: int, **fields: Any) -> None:
        self._http = http
        self._seed = seed
        self._fields = fields
        self.ids: list[int] = []

    async def turn(self, num_tokens: int) -> Answer:
        """Ask with so many tokens more than the history has."""
        self.ids += [(self._seed * 31 + index * 7) % 200 for index in range(len(self.ids), len(self.ids) + num_tokens)]
        answer = await ask(self._http, self.ids, 4, **self._fields)
        assert answer.error is None
        self.ids += answer.token_ids
        return answer


def cached_tokens(answer: Answer) -> int:
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


async def load_only(
    mesh: Mesh, http: httpx.AsyncClient, engine: str, prompts: Sequence[list[int]] = OTHERS
) -> list[asyncio.Task[Answer]]:
    """Give an engine requests that the other one does not get."""
    (other,) = {*ENGINES} - {engine}
    async with open_channel(mesh.address(other)) as channel:
        admin = EngineAdminStub(channel)
        await admin.Pause(PauseRequest(mode=PAUSE_MODE_KEEP))
        tasks = [asyncio.create_task(ask(http, prompt, 1900 - len(prompt))) for prompt in prompts]
        await mesh.until_running(len(prompts))
        await admin.Resume(ResumeRequest())
    await until(mesh, {engine: (0, len(prompts)), other: (0, 0)})
    return tasks


async def engines_of(mesh: Mesh, fields: dict[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    """Return where the turns of a session ran, the last one while that engine had requests and the other one none, and
    how many of their tokens were cached."""
    async with mesh.running(), mesh.http() as http, asyncio.timeout(SOON):
        session = Session(http, 1, **fields)
        answers = []
        for count in TURNS[:2]:
            await until(mesh, dict.fromkeys(ENGINES, (0, 0)))  # otherwise a turn that has ended counts as load
            answers.append(await session.turn(count))
        tasks = await load_only(mesh, http, answers[-1].timeline["prefill_engine"])
        try:
            answers.append(await session.turn(TURNS[2]))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return [each.timeline["prefill_engine"] for each in answers], [cached_tokens(each) for each in answers]


@pytest.mark.parametrize("fields", [{}, {"prompt_cache_key": "one"}], ids=["by its beginning", "by its id"])
@pytest.mark.parametrize("placement", ["score", "cost"])
async def test_a_session_returns_to_its_kv(socket_dir: Path, placement: str, fields: dict[str, Any]) -> None:
    mesh = Mesh(socket_dir, engines=2, engine=ENGINE, coordinator={"placement": placement})
    engines, cached = await engines_of(mesh, fields)
    assert len(set(engines)) == 1
    assert cached == [0, 900, 1504], "all of the prompt before"


async def test_without_sessions_the_load_alone_decides(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=2, engine=ENGINE, coordinator={"sessions": False})
    engines, cached = await engines_of(mesh, {"prompt_cache_key": "one"})
    assert engines[0] == engines[1] != engines[2]
    assert cached[2] == 0


@pytest.mark.parametrize("placement", ["score", "cost"])
async def test_a_turn_without_room_loads_its_kv_elsewhere(socket_dir: Path, tmp_path: Path, placement: str) -> None:
    folder = tmp_path / "kv"
    # Room for the second turn beside the first one's blocks, which the store may still be saving.
    engine = {**ENGINE, "num_kv_blocks": 640, "kv_store": folder.as_uri(), "kv_store_bytes": 64 << 20}
    mesh = Mesh(socket_dir, engines=2, engine=engine, coordinator={"placement": placement})
    async with mesh.running(), mesh.http() as http, asyncio.timeout(SOON):
        session = Session(http, 1)
        answers = []
        for count in TURNS[:2]:
            await until(mesh, dict.fromkeys(ENGINES, (0, 0)))  # otherwise a turn that has ended counts as load
            answers.append(await session.turn(count))
        past = sum(TURNS[:2]) // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE
        while len(list(folder.glob("*.kv"))) < past // BLOCK_SIZE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        others = [[3 + index % 190 for index in range(1500)]]
        tasks = await load_only(mesh, http, answers[-1].timeline["prefill_engine"], others)
        try:
            answers.append(await session.turn(TURNS[2]))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    first, second, third = (each.timeline for each in answers)
    assert first["prefill_engine"] == second["prefill_engine"] != third["prefill_engine"]
    assert (second["session_kv"], third["session_kv"]) == ("home", "store")
    assert cached_tokens(answers[2]) == past, "loaded, not computed"
