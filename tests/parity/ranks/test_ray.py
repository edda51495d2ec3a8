"""An engine over a Ray cluster of two nodes on this machine: tensor parallel, each rank on a node of its own."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.parity.engine import Engine
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.config import EngineConfig, ParallelConfig
from tokenloom.engine_core.errors import ExecutorFailedError, WorkerLostError
from tokenloom.engine_core.executor import make_executor
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.ray_executor import RayExecutor
from tokenloom.services.engine.core.workers import make_worker

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of two processors each, without a dashboard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, log_to_driver=False)
    yield
    ray.shutdown()
    nodes.shutdown()


def on_ray(config: EngineConfig) -> Executor:
    return make_executor(config, make_worker)


def two_ranks(tp: int, pp: int) -> ParallelConfig:
    return ParallelConfig(distributed_executor_backend="ray", tensor_parallel_size=tp, pipeline_parallel_size=pp)


@pytest.mark.parametrize(("name", "tp", "pp"), [("qwen3_moe", 2, 1), ("llama", 1, 2)])
def test_ranks_on_two_nodes_give_the_tokens_of_one_process(
    cluster: None, name: str, tp: int, pp: int, tmp_path: Path
) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    generator = np.random.default_rng(5)
    prompts, limits = [generator.integers(3, 503, length).tolist() for length in (1, 17, 70)], [12] * 3
    alone = Engine(path, num_blocks=60)
    engine = Engine(path, num_blocks=60, parallel=two_ranks(tp, pp), executor=on_ray)
    executor = engine.core.executor
    assert isinstance(executor, RayExecutor)
    import ray

    assert len({node for node, _ in ray.get([actor.address.remote() for actor in executor.actors])}) == 2
    assert engine.generate(prompts, limits) == alone.generate(prompts, limits)
    drawn = {"temperature": 1.0, "top_p": 0.9}
    assert engine.generate(prompts, limits, **drawn) == alone.generate(prompts, limits, **drawn)
    engine.core.check_health()
    engine.core.shutdown()


def test_a_rank_that_ends_ends_its_engine(cluster: None, tmp_path: Path) -> None:
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


def test_more_workers_than_the_cluster_has_room_for(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.engine_core.executor.ray_executor._PLACEMENT_SECONDS", 1.0)
    with pytest.raises(ExecutorFailedError, match="no room for 4 workers with a CPU each"):
        on_ray(EngineConfig(parallel=two_ranks(2, 2)))
