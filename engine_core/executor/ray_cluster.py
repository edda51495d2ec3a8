"""Finds the Ray cluster of an engine, and room in it for workers."""

from collections.abc import Mapping
from typing import Any

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError

_PLACEMENT_SECONDS = 60.0
"""How long the cluster may take to make room for the workers."""
_SHARE_OF_NODE = 0.001
"""Of the resource that names a node: a bundle that asks for a share of it is placed there."""


def connect() -> Any:
    """Join the Ray cluster and return the library."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        raise ValueError(
            'distributed_executor_backend ray needs Ray; install it with: pip install "tokenloom[ray]"'
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(
                "distributed_executor_backend: there is no Ray cluster; start one with `ray start --head`, and join "
                f"other machines with `ray start --address HOST:6379` ({error})"
            ) from None
    return ray


def reserve(ray: Any, count: int, gpus: int, *, on_this_machine: bool) -> Any:
    """Return a placement group with a bundle for each of ``count`` workers, as soon as the cluster has made room.

    Raises ``ExecutorFailedError`` if it has none.
    """
    bundle: dict[str, float] = {"CPU": 1, "GPU": gpus}
    if on_this_machine:
        # Ray has no rule "on this node" for placement groups, but each node owns a resource of its name, of which a
        # thousandth is enough.
        bundle[f"node:{ray.util.get_node_ip_address()}"] = _SHARE_OF_NODE
    group = ray.util.placement_group([bundle] * count)
    if group.wait(_PLACEMENT_SECONDS):
        return group
    resources = ray.available_resources()
    ray.util.remove_placement_group(group)
    free = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    where = " on the machine of the engine, where all must be because KV moves" if on_this_machine else ""
    raise ExecutorFailedError(
        f"the Ray cluster has no room for {count} workers with a CPU{' and a GPU' if gpus else ''} each{where}; "
        f"free in the cluster are {free}"
    )


def gpus_of_worker(config: EngineConfig, cluster: Mapping[str, float]) -> int:
    """Return how many GPUs each worker gets.

    Args:
        config: Of the engine.
        cluster: What the nodes that have joined the Ray cluster have, by kind.

    Raises ``ValueError`` if the device is to be chosen, and none of these nodes has a GPU: one that has may join later,
    and the machine of the engine's core need not have what the workers have.
    """
    worker = config.worker
    if worker.worker != "model":
        return 0
    if worker.device == "auto" and not cluster.get("GPU"):
        raise ValueError(
            "device: no node that has joined the Ray cluster has a GPU, and others may join later; say which workers "
            "to wait for: cpu or cuda, instead of auto"
        )
    return int(worker.device != "cpu")
