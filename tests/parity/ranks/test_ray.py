"""An engine over a Ray cluster of two nodes on this machine: tensor parallel, each rank on a node of its own."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from tests.engine_core.processes import has_ended, wait_until
from tests.gpu_worker.kv_connector.engine_pair import MAKE, Pair
from tests.mesh.asking import ask
from tests.mesh.harness import SOON, Mesh
from tests.parity.engine import Engine
from tests.parity.ranks.ray_nodes import QUIET, two_nodes
from tests.parity.ranks.test_ranks_kv import GREEDY, PROMPT, of
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.config import EngineConfig, ParallelConfig, WorkerConfig
from tokenloom.engine_core.data.errors import ExecutorFailedError, WorkerLostError
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.ray_executor import RayExecutor
from tokenloom.services.engine.core.workers import make_worker

pytestmark = QUIET


def on_ray(config: EngineConfig) -> Executor:
    return make_executor(config, make_worker)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as nodes:
        yield nodes


def two_ranks(tp: int, pp: int) -> ParallelConfig:
    return ParallelConfig(distributed_executor_backend="ray", tensor_parallel_size=tp, pipeline_parallel_size=pp)


@pytest.mark.parametrize(("name", "tp", "pp"), [("qwen3_moe", 2, 1), ("llama", 1, 2)])
def test_ranks_on_two_nodes_give_the_tokens_of_one_process(
    cluster: Any, name: str, tp: int, pp: int, tmp_path: Path
) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    generator = np.random.default_rng(5)
    prompts, limits = [generator.integers(3, 503, length).tolist() for length in (1, 17, 70)], [12] * 3
    alone = Engine(path, num_blocks=60)
    engine = Engine(path, num_blocks=60, parallel=two_ranks(tp, pp), executor=on_ray)
    executor = engine.core.executor
    assert isinstance(executor, RayExecutor)
    assert len(set(executor.nodes)) == 2
    assert engine.generate(prompts, limits) == alone.generate(prompts, limits)
    drawn = {"temperature": 1.0, "top_p": 0.9}
    assert engine.generate(prompts, limits, **drawn) == alone.generate(prompts, limits, **drawn)
    engine.core.check_health()
    engine.core.shutdown()


def test_a_rank_that_ends_ends_its_engine(cluster: Any, tmp_path: Path) -> None:
    import threading

    import ray

    config = msgspec.structs.replace(EngineConfig(), parallel=two_ranks(2, 1))
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, worker="hash"))
    executor = make_executor(config, make_worker)
    assert isinstance(executor, RayExecutor)
    assert executor.load_model().vocab_size == 32_000
    lost = threading.Event()
    executor.on_failure(lost.set)
    ray.kill(executor.actors[1])
    assert lost.wait(3.0)
    with pytest.raises(WorkerLostError, match="worker 1 on Ray ended"):
        executor.collective_rpc("check_health")
    with pytest.raises(ExecutorFailedError, match="not replaced"):
        executor.replace_workers()
    executor.shutdown()


def test_the_parts_of_ranks_on_ray_move(cluster: Any) -> None:
    alone = Pair(MAKE["shm"])
    expected = alone.ask("a", PROMPT, GREEDY)
    alone.close()

    def two_on_ray(config: EngineConfig) -> Executor:
        worker = msgspec.structs.replace(config.worker, device="cpu")
        return on_ray(msgspec.structs.replace(config, worker=worker, parallel=two_ranks(2, 1)))

    pair = Pair(MAKE["unix"], two_on_ray, of(2, 1))
    assert isinstance(pair.prefill.core.executor, RayExecutor)
    assert len(set(pair.prefill.core.executor.nodes)) == 2
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats, pool = pair.decode.core.scheduler.stats(), pair.decode.core.executor.kv_pool()
    assert stats.kv_bytes_received == {"socket": 7 * pool.block_bytes}
    assert stats.kv_recomputes == {}
    pair.close()


def test_more_workers_than_the_cluster_has_room_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.engine_core.executor.ray_cluster._PLACEMENT_SECONDS", 1.0)
    with pytest.raises(ExecutorFailedError, match="no room for 4 workers with a CPU each"):
        on_ray(EngineConfig(parallel=two_ranks(2, 2), worker=WorkerConfig(device="cpu")))


async def test_a_lost_node_ends_its_engine_and_requests_go_on_elsewhere(
    cluster: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this file: the cluster has one node afterwards."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    common = {"hash_step_seconds": 0.001}
    on_nodes = common | {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    mesh = Mesh(socket_dir, engines=2, engine=lambda index: common if index else on_nodes)
    async with mesh.running(), mesh.http() as http, asyncio.timeout(SOON):
        asked = [asyncio.create_task(ask(http, [number, 5], 200)) for number in range(12)]
        while not await mesh.gauge("requests_running", "engine-0"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        (core,) = (child for child in psutil.Process().children() if "engine-0" in child.cmdline())
        (node,) = cluster.worker_nodes
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        lost_at = time.monotonic()
        assert await asyncio.to_thread(wait_until, lambda: has_ended(core.pid), SOON)
        assert time.monotonic() - lost_at < 3.0
        for number, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.error is None
            assert answer.token_ids == mesh.expected([number, 5], 200)
        await mesh.engines[0].kill()
