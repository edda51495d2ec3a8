"""An operator pauses an engine under load: in no mode does a client lose anything."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_WAIT,
    GetEngineInfoRequest,
    PauseMode,
    PauseRequest,
    ResumeRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

NUM_CLIENTS = 12
MAX_TOKENS = 60


@pytest.fixture
async def pair(socket_dir: Path) -> AsyncIterator[Mesh]:
    """Two engines, each with room for half of its requests."""
    async with Mesh(socket_dir, engines=2, engine={"hash_step_seconds": 0.01, "max_num_seqs": 3}).running() as mesh:
        yield mesh


@pytest.mark.parametrize("mode", [PAUSE_MODE_ABORT, PAUSE_MODE_WAIT, PAUSE_MODE_KEEP])
async def test_nothing_is_lost(pair: Mesh, mode: PauseMode) -> None:
    answers = [Answer() for _ in range(NUM_CLIENTS)]
    async with pair.http() as http, ready_channel(pair.engines[0].settings.listen) as channel:
        admin = EngineAdminStub(channel)
        async with asyncio.timeout(SOON), asyncio.TaskGroup() as group:
            asked = [
                group.create_task(ask(http, [index, 2, 3], MAX_TOKENS, answer)) for index, answer in enumerate(answers)
            ]
            await pair.until_running(6)
            await admin.Pause(PauseRequest(mode=mode))
            after = await ask(http, [50, 51], 3)
            assert after.token_ids == pair.expected([50, 51], 3), "the other engine took it"
            if mode == PAUSE_MODE_KEEP:
                assert not all(task.done() for task in asked)
            assert (await admin.GetEngineInfo(GetEngineInfoRequest())).running == (3 if mode == PAUSE_MODE_KEEP else 0)
            await admin.Resume(ResumeRequest())
    for index, answer in enumerate(answers):
        assert answer.error is None
        expected = pair.expected([index, 2, 3], MAX_TOKENS)
        if answer.finish_reason == "abort":
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert (answer.finish_reason, answer.token_ids) == ("length", expected)
    num_aborted = sum(answer.finish_reason == "abort" for answer in answers)
    assert num_aborted >= 3 if mode == PAUSE_MODE_ABORT else not num_aborted


async def test_requests_wait_while_the_whole_mesh_is_paused(pair: Mesh) -> None:
    async with pair.http() as http, asyncio.timeout(SOON):
        for engine in pair.engines:
            async with ready_channel(engine.settings.listen) as channel:
                await EngineAdminStub(channel).Pause(PauseRequest(mode=PAUSE_MODE_WAIT))
        while (response := await http.get("/health")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "engine" in response.json()["missing"]
        asked = asyncio.create_task(ask(http, [1], 3))
        for engine in pair.engines:
            async with ready_channel(engine.settings.listen) as channel:
                await EngineAdminStub(channel).Resume(ResumeRequest())
        assert (await asked).token_ids == pair.expected([1], 3)
