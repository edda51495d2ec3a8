"""Cores in actors of a Ray cluster of two nodes on this machine: ``data_parallel_backend`` ray."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.e2e.conftest import serving
from tests.e2e.test_scale import scale
from tests.engine_core.client.blocking import SyncMPClient
from tests.engine_core.data_parallel.cores import Group
from tests.engine_core.processes import has_ended, wait_until
from tests.mesh.asking import ask
from tests.mesh.harness import SOON, Mesh
from tests.parity.ranks.ray_nodes import QUIET, two_nodes
from tests.parity.ranks.test_data_parallel import EXPERTS, alone
from tests.parity.ranks.test_elastic import make_requests
from tests.parity.reference import save_random
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    KVConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.errors import EngineConfigError, EngineDeadError
from tokenloom.engine_core.data.messages import EngineCoreRequest

pytestmark = QUIET
ON_RAY = {"hash_step_seconds": 0.001, "data_parallel_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as nodes:
        yield nodes


def cores() -> dict[str, psutil.Process]:
    """The cores whose parents are actors of this cluster, by the names of their engines."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent, words = process.parent(), process.cmdline()
            if parent is not None and parent.name().startswith("ray::CoreActor") and "--instance-id" in words:
                found[words[words.index("--instance-id") + 1]] = process
    return found


def in_group(rank: int) -> dict[str, object]:
    return ON_RAY | {"data_parallel_size": 2, "data_parallel_rank": rank, "data_parallel_group": "g"}


async def test_each_rank_of_a_group_has_its_core_on_a_node_and_requests_outlive_it(
    cluster: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    mesh = Mesh(socket_dir, engines=2, engine=in_group)
    async with mesh.running(), mesh.http() as http, asyncio.timeout(SOON):
        running = cores()
        assert sorted(running) == ["engine-0", "engine-1"]
        asked = [asyncio.create_task(ask(http, [number, 5], 200)) for number in range(12)]
        for name in running:
            while not await mesh.gauge("requests_running", name):  # noqa: ASYNC110
                await asyncio.sleep(0)
        running["engine-0"].kill()
        for number, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.error is None
            assert answer.token_ids == mesh.expected([number, 5], 200)
        await mesh.engines[0].kill()
    assert await asyncio.to_thread(wait_until, lambda: has_ended(running["engine-1"].pid), SOON)


def core(**config: Any) -> SyncMPClient:
    parallel = ParallelConfig(data_parallel_backend="ray")
    return SyncMPClient(EngineConfig(worker=WorkerConfig(worker="hash"), parallel=parallel, **config))


def test_an_actor_that_ends_ends_its_core_and_is_told(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    client = core()
    try:
        (process,) = cores().values()
        client.call_utility("pause", "keep")
        client.add_request(EngineCoreRequest("a", [1, 2], CoreSamplingParams(max_tokens=3, seed=0)))
        process.parent().kill()
        with pytest.raises(EngineDeadError):
            client.get_output()  # of a step that never comes: the request is long
        assert wait_until(lambda: has_ended(process.pid), SOON)
    finally:
        client.close()


def test_a_core_that_does_not_start_says_why(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with pytest.raises(EngineConfigError, match="max_model_len is 1; it must be at least 2"):
        core(max_model_len=1)
    with pytest.raises(EngineConfigError, match="KV does not move to and from a core on Ray"):
        core(kv=KVConfig(transports=("shm",)))


async def test_a_mesh_grows_by_a_rank_that_ray_places(cluster: Any) -> None:
    with serving() as serve:
        flags = ("--worker", "hash", "--data-parallel-size", "1", "--data-parallel-backend", "ray")
        mesh = serve(*flags, RAY_ADDRESS=cluster.address)
        assert sorted(cores()) == ["engine-0"]
        assert "1 → 2 ranks" in await scale(mesh, "data-parallel", "2")
        assert sorted(cores()) == ["engine-0", "engine-1"]
        headers = {"X-data-parallel-rank": "1"}
        async with httpx.AsyncClient(timeout=SOON, base_url=mesh.url, headers=headers) as http:
            body = {"model": "tokenloom-demo", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert "2 → 1 rank" in await scale(mesh, "data-parallel", "1")
        assert await asyncio.to_thread(wait_until, lambda: sorted(cores()) == ["engine-0"], SOON)
        assert mesh.stop(signal.SIGTERM) == 0
    assert await asyncio.to_thread(wait_until, lambda: not cores(), SOON)


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_of_spread_experts_are_cores_on_ray(
    cluster: Any, socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Each core is on a node; their hub is beside the client of rank 0, on this one. A lost rank comes again."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    path = save_random("qwen3_moe", tmp_path, head_dim=24, **EXPERTS)
    config = EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    requests = make_requests(4, 60)
    expected = alone(config, requests)
    parallel = ParallelConfig(enable_expert_parallel=True, data_parallel_backend="ray")
    group = Group(socket_dir, config=msgspec.structs.replace(config, parallel=parallel))
    try:
        assert all("ep" in rank.ready.numerics.split("/") for rank in group.ranks)
        nodes = {process.parent().ppid() for process in placed()}
        assert len(nodes) == 2, "each core is on a node of its own"
        for index, request in enumerate(requests):
            group.add(index % 2, request)
        group.pump(lambda: all(len(tokens) > 5 for tokens in group.tokens.values()), seconds=SOON)
        group.lose(lost)
        group.finish()
        assert group.tokens == expected
    finally:
        group.close()


def placed() -> list[psutil.Process]:
    """The cores whose parents are actors of this cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if parent is not None and parent.name().startswith("ray::CoreActor"):
                found.append(process)
    return found
