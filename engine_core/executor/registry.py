"""Which executor a configuration asks for."""

from collections.abc import Callable

from ..config import EngineConfig
from ..worker import Worker
from .interface import Executor
from .threaded import ThreadedExecutor
from .uniproc import UniProcExecutor


def make_executor(config: EngineConfig, make_worker: Callable[[EngineConfig], Worker]) -> Executor:
    """An executor over a worker that ``make_worker`` makes. Raises ``ValueError`` for a setting that does not work."""
    if config.scheduler.async_scheduling:
        return ThreadedExecutor(make_worker(config))
    return UniProcExecutor(make_worker(config))
