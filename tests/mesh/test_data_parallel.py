"""A data-parallel group in a mesh: requests that name their rank, waves, another size under load, a lost rank."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.engine_core.data_parallel.cores import free_port
from tests.engine_core.processes import has_ended
from tests.mesh.asking import ask
from tests.mesh.harness import MODEL, SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.cli.failures import CommandFailed
from tokenloom.cli.mesh.coordinator import run as scale
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.v1.engine_pb2 import ReconfigureRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

GROUP = "data-parallel"


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """The demo model's tokenizer, with a configuration that says that its layers have experts."""
    directory = tmp_path / MODEL
    directory.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    return directory


def ranks(directory: Path, model: Path | str, size: int) -> Callable[[int], dict[str, Any]]:
    """Return the settings of the ranks of one group; later ones join a group that has more."""

    def settings(index: int) -> dict[str, Any]:
        return {
            "model": str(model),
            "served_model_name": MODEL,
            "data_parallel_size": max(size, index + 1),
            "data_parallel_rank": index,
            "data_parallel_address": f"unix:{directory}/data-parallel",
            "max_num_seqs": 4,
            "hash_step_seconds": 0.001,
        }

    return settings


async def test_a_request_names_its_rank(socket_dir: Path, experts: Path) -> None:
    async with Mesh(socket_dir, engines=2, engine=ranks(socket_dir, experts, 2)).running() as mesh:
        for rank in ("1", "0", "1", "1"):
            async with mesh.http(headers={"X-data-parallel-rank": rank}) as http:
                answer = await ask(http, [int(rank), 2, 3], 40)
            assert answer.token_ids == mesh.expected([int(rank), 2, 3], 40)
            assert answer.timeline["decode_engine"] == f"engine-{rank}"
        async with mesh.http(headers={"X-data-parallel-rank": "two"}) as http:
            error = (await ask(http, [1], 1)).error
            assert error is not None
            assert error["message"] == "X-data-parallel-rank must be the number of a rank, from 0 on"
        async with mesh.http(headers={"X-data-parallel-rank": "2"}) as http:
            error = (await ask(http, [1], 1)).error
            assert error is not None
            assert error["message"] == "data_parallel_rank 2 does not exist: there are 2 ranks, from 0 on"


async def test_the_ranks_of_two_meshes_compute_in_waves(socket_dir: Path, experts: Path) -> None:
    """As on two machines with hybrid balancing: neither coordinator knows the ranks of the other one."""
    address = f"127.0.0.1:{free_port()}"
    secret = socket_dir / "secret"
    secret.write_text("a secret of both machines")

    def settings(rank: int) -> dict[str, Any]:
        group = ranks(socket_dir, experts, 2)(rank)
        return group | {"data_parallel_address": address, "data_parallel_secret_file": str(secret)}

    directories = [socket_dir / name for name in ("a", "b")]
    for directory in directories:
        directory.mkdir()
    async with asyncio.timeout(SOON), contextlib.AsyncExitStack() as stack:
        made = [
            Mesh(directory, engines=1, engine=lambda _, rank=rank: settings(rank))  # type: ignore[misc]
            for rank, directory in enumerate(directories)
        ]
        meshes = await asyncio.gather(*(stack.enter_async_context(mesh.running()) for mesh in made))
        for turn in range(2):
            for number, mesh in enumerate(meshes):  # the ranks rest in between
                async with mesh.http() as http:
                    prompt = [number, turn, 9]
                    answers = await asyncio.gather(*(ask(http, [*prompt, each], 40) for each in range(3)))
                for each, answer in enumerate(answers):
                    assert answer.error is None
                    assert answer.token_ids == mesh.expected([*prompt, each], 40)
        # One after the other, the first mesh to stop would take the other one's rank along.
        await asyncio.gather(*(mesh.engines[0].kill() for mesh in meshes))


@pytest.mark.parametrize("has_experts", [True, False])
async def test_no_request_is_lost_while_a_group_grows_and_shrinks(
    socket_dir: Path, experts: Path, has_experts: bool
) -> None:
    settings = ranks(socket_dir, experts if has_experts else DEMO_MODEL, 2)
    async with Mesh(socket_dir, engines=2, engine=settings).running() as mesh, mesh.http() as http:
        engines: set[str] = set()

        async def client(number: int) -> None:
            for turn in range(1000):
                if is_done.is_set():
                    return
                prompt = [number, turn % 90, 3]
                asked_among = engines  # another set is used for what is asked later
                answer = await ask(http, prompt, 30)
                assert answer.error is None
                assert answer.token_ids == mesh.expected(prompt, 30)
                asked_among.add(answer.timeline["decode_engine"])

        is_done = asyncio.Event()
        async with asyncio.timeout(2 * SOON), asyncio.TaskGroup() as clients:
            for number in range(12):
                clients.create_task(client(number))
            new = [mesh.new_engine(index) for index in (2, 3)]
            starting = [asyncio.create_task(part.start()) for part in new]
            grown = await scale(mesh.address("coordinator-0"), None, GROUP, 4, wait=SOON)
            assert grown == "data-parallel group data-parallel: 2 → 4 ranks"
            await asyncio.gather(*starting)
            while engines != {"engine-0", "engine-1", "engine-2", "engine-3"}:
                await asyncio.sleep(0)
                await ask(http, [1], 1)
            shrunk = await scale(mesh.address("coordinator-0"), None, GROUP, 2, wait=0.0)
            assert shrunk.endswith("without requests now, may be stopped: engine-2 (rank 2), engine-3 (rank 3)")
            engines = set()
            await asyncio.gather(*(ask(http, [7, number], 3) for number in range(30)))
            is_done.set()
        assert engines <= {"engine-0", "engine-1"}
        await asyncio.gather(*(part.stop() for part in new))


async def test_a_lost_rank_costs_no_request_and_no_other_rank(socket_dir: Path, experts: Path) -> None:
    async with (
        Mesh(socket_dir, engines=3, engine=ranks(socket_dir, experts, 3)).running() as mesh,
        mesh.http() as http,
    ):
        async with asyncio.timeout(SOON):
            asked = [asyncio.create_task(ask(http, [number, 5], 200)) for number in range(12)]
            await mesh.until_running(6)
            others = [mesh.engines[rank].core_pid() for rank in (0, 2)]
            os.kill(mesh.engines[1].core_pid(), signal.SIGKILL)
            for number, answer in enumerate(await asyncio.gather(*asked)):
                assert answer.error is None
                assert answer.token_ids == mesh.expected([number, 5], 200)
        assert [mesh.engines[rank].core_pid() for rank in (0, 2)] == others
        assert not any(map(has_ended, others))
        await mesh.engines[1].kill()


async def test_what_has_no_group_is_refused(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh, ready_channel(mesh.engines[0].settings.listen) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="belongs to no data-parallel group"):
            await EngineAdminStub(channel).Reconfigure(ReconfigureRequest(data_parallel_size=2))
        with pytest.raises(CommandFailed, match="answered: No rank of data-parallel group 'data-parallel' has joined"):
            await scale(mesh.address("coordinator-0"), None, GROUP, 2, wait=SOON)
