"""Makes the worker that a configuration names."""

import sys
from collections.abc import Callable

from tokenloom.engine_core.config import EngineConfig
from tokenloom.engine_core.worker import Worker

WORKER_COMMAND = (sys.executable, "-m", "tokenloom.services.engine.core.worker_main")
"""Starts a worker's process; the executor appends ``--address ADDRESS``."""


def make_worker(config: EngineConfig) -> Worker:
    """Return the worker that ``config`` names. Raises ``ValueError`` for an unknown one."""
    name = config.worker.worker
    if name not in _WORKERS:
        raise ValueError(f"worker: {name!r} is unknown; use one of {', '.join(_WORKERS)}")
    return _WORKERS[name](config)


def _model_worker(config: EngineConfig) -> Worker:
    # Imported here because importing torch takes seconds, and the other workers do not need it.
    from tokenloom.gpu_worker.platform.devices import make_worker as make_model_worker

    return make_model_worker(config)


def _hash_worker(config: EngineConfig) -> Worker:
    from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

    return HashWorker(config)


def _timed_worker(config: EngineConfig) -> Worker:
    from tokenloom.engine_core.fake_workers.timed_worker import TimedWorker

    return TimedWorker(config)


_WORKERS: dict[str, Callable[[EngineConfig], Worker]] = {
    "model": _model_worker,
    "hash": _hash_worker,
    "timed": _timed_worker,
}
