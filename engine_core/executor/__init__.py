"""Executors compute the core's steps on workers: in the core's thread, in a thread or in processes of their own."""

from collections.abc import Callable, Sequence

from ..config import EngineConfig
from ..fake_workers.timed_worker import TimedWorker
from ..worker import Worker
from .executor import Executor
from .multiproc import MultiprocExecutor
from .threaded import ThreadedExecutor
from .timed import TimedExecutor
from .uniproc import UniProcExecutor


def make_executor(
    config: EngineConfig, make_worker: Callable[[EngineConfig], Worker], worker_command: Sequence[str] = ()
) -> Executor:
    """Return the executor that ``config`` names, over a worker that ``make_worker`` makes or processes that
    ``worker_command`` starts.

    Raises ``ValueError`` for a setting that does not work.
    """
    backend = config.parallel.distributed_executor_backend
    if backend == "mp":
        return MultiprocExecutor(config, worker_command)
    if backend != "uni":
        raise ValueError(f"distributed_executor_backend is {backend!r}; use uni or mp")
    worker = make_worker(config)
    if isinstance(worker, TimedWorker):
        return TimedExecutor(worker, overlaps=config.scheduler.async_scheduling)
    return ThreadedExecutor(worker) if config.scheduler.async_scheduling else UniProcExecutor(worker)
