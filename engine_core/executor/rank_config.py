"""Derives from the configuration of an engine that of each worker, and how many steps overlap."""

import os

from msgspec.structs import replace

from ..data.config import EngineConfig


def rank_config(config: EngineConfig, rank: int, rendezvous: str, num_on_host: int) -> EngineConfig:
    """Return the configuration of the worker ``rank``, which finds the others at ``rendezvous``.

    Args:
        config: That of the engine.
        rank: In [0, world_size).
        rendezvous: As in ``ParallelConfig.rendezvous``.
        num_on_host: How many workers of the engine share its machine: each gets a part of its cores, and counts as a
            user of its memory.
    """
    cache, worker = config.cache, config.worker
    if num_on_host > 1:
        cache = replace(cache, engines_on_host=cache.engines_on_host * num_on_host)
        place = rank % num_on_host
        cpus = worker.cpus[place::num_on_host] if len(worker.cpus) >= num_on_host else worker.cpus
        cores = worker.num_threads or len(worker.cpus) or len(os.sched_getaffinity(0))
        worker = replace(worker, cpus=cpus, num_threads=max(1, cores // num_on_host))
    parallel = replace(config.parallel, rank=rank, rendezvous=rendezvous)
    return replace(config, cache=cache, worker=worker, parallel=parallel)


def most_in_flight(config: EngineConfig) -> int:
    """Return how many steps workers in processes of their own may have begun: one for each stage, and one more than the
    computing one where the next is scheduled meanwhile."""
    return max(config.parallel.pipeline_parallel_size, 2 if config.scheduler.async_scheduling else 1)
