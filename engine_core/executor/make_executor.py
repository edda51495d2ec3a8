"""Chooses the executor that a configuration names."""

from collections.abc import Callable, Sequence

from tokenloom.process.plugins import load

from ..data.config import EngineConfig
from ..fake_workers.timed_worker import TimedWorker
from ..kv_transfer.pool_parts import PartTransport
from .executor import Executor
from .multiproc import MultiprocExecutor
from .uniproc import ThreadedExecutor, TimedExecutor, UniProcExecutor
from .worker import Worker


def make_executor(
    config: EngineConfig,
    make_worker: Callable[[EngineConfig], Worker],
    worker_command: Sequence[str] = (),
    make_transport: Callable[[EngineConfig, str], PartTransport] | None = None,
) -> Executor:
    """Return the executor that ``config`` names, over a worker that ``make_worker`` makes or processes that
    ``worker_command`` starts. ``make_transport``: as for :class:`.ray_executor.RayExecutor`.

    Raises ``ValueError`` for a setting that does not work.
    """
    backend, world_size = config.parallel.distributed_executor_backend, config.parallel.world_size
    if ":" in backend:
        plugin: Executor = load("executors", backend, config.plugins)(config, make_worker, worker_command)
        return plugin
    if backend == "auto":
        backend = "mp" if world_size > 1 else "uni"
    if backend == "mp":
        return MultiprocExecutor(config, worker_command)
    if backend == "ray":
        from .ray_executor import RayExecutor  # here, because it is an extra that takes seconds to import

        return RayExecutor(config, make_worker, make_transport)
    if backend != "uni" or world_size > 1:
        raise ValueError(f"distributed_executor_backend is {backend!r}; use uni for one worker, mp or ray for several")
    worker = make_worker(config)
    if isinstance(worker, TimedWorker):
        return TimedExecutor(worker, overlaps=bool(config.scheduler.async_scheduling))
    # One thread by default: on a CPU the model computes on the cores that would schedule, and overlapping gave 0.98 of
    # the tokens/s on the demo model, 1.08 where the worker only waits.
    return ThreadedExecutor(worker) if config.scheduler.async_scheduling else UniProcExecutor(worker)
