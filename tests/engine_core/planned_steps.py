"""Makes and steps a scheduler without a worker."""

from tests.engine_core.invariants import check_counts, check_scheduler
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.messages import EngineCoreOutput
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.scheduling.scheduler import Scheduler


class Clock:
    """Counts calls: every reading is one nanosecond later."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def make_scheduler(
    *,
    num_blocks: int = 64,
    max_model_len: int = 100,
    caching: bool = True,
    num_stages: int = 1,
    num_state_slots: int = 0,
    state_chunk: int = 1,
    **settings: object,
) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 32} | settings)  # type: ignore[arg-type]
    cache = CacheConfig(block_size=4, enable_prefix_caching=caching)
    parallel = ParallelConfig(pipeline_parallel_size=num_stages)
    engine = EngineConfig(worker=WorkerConfig(model=""), cache=cache, scheduler=config, parallel=parallel)
    kv_cache = KVCacheConfig(num_blocks, max_model_len, num_state_slots=num_state_slots, state_chunk=state_chunk)
    return Scheduler(engine, kv_cache, Clock())


def step(scheduler: Scheduler, token_id: int = 50) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Run a step whose worker answers ``token_id`` for every request that draws a token."""
    scheduled = scheduler.schedule()
    check_counts(scheduler, scheduled)
    sampled = []
    for request_id in scheduled.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        sampled.append([token_id] if request.kv.num_computed_tokens == request.num_tokens else [])
    result = ModelRunnerOutput(list(scheduled.num_scheduled_tokens), sampled)
    outputs = scheduler.results.apply(scheduled, result)
    check_scheduler(scheduler)
    return scheduled, outputs
