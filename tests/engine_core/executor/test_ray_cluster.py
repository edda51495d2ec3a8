"""Which device the workers of a Ray cluster get, without a cluster."""

import pytest
from msgspec.structs import replace

from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.engine_core.executor.ray_cluster import gpus_of_worker


def config(**worker: str) -> EngineConfig:
    return replace(EngineConfig(), worker=WorkerConfig(**worker))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "cluster", "expected"),
    [
        ("cpu", {"CPU": 4.0, "GPU": 8.0}, 0),
        ("cuda", {"CPU": 4.0}, 1),
        ("cuda", {"CPU": 4.0, "GPU": 8.0}, 1),
        ("auto", {"CPU": 4.0, "GPU": 1.0}, 1),
    ],
)
def test_a_named_device_needs_no_node_to_have_joined(device: str, cluster: dict[str, float], expected: int) -> None:
    assert gpus_of_worker(config(device=device), cluster) == expected


def test_auto_does_not_take_processors_because_no_gpu_has_joined_yet() -> None:
    with pytest.raises(ValueError, match="device: no node that has joined the Ray cluster has a GPU"):
        gpus_of_worker(config(device="auto"), {"CPU": 4.0})


def test_workers_without_a_model_need_no_device() -> None:
    assert gpus_of_worker(config(worker="hash"), {"CPU": 4.0, "GPU": 8.0}) == 0
