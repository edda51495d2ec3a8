"""An engine of several ranks in one process: each worker has a thread, and they meet in a file, as processes do."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from tokenloom.engine_core.data.config import EngineConfig, ParallelConfig
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, PendingOutput, SchedulerOutput, await_output
from tokenloom.engine_core.executor.executor import PoolSpec, call_worker
from tokenloom.engine_core.executor.ranks import merged_info, most_in_flight, rank_config
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.engine_core.wire.frames import from_raw, to_raw
from tokenloom.gpu_worker.devices import make_worker

Result = TypeVar("Result")


class RankThreads:
    """Implements ``Executor``."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.output_rank = config.parallel.output_rank
        self.max_concurrent_batches = most_in_flight(config)
        self._num_copies = config.parallel.prefill_context_parallel_size
        ranks = range(config.parallel.world_size)
        config = replace(config, worker=replace(config.worker, num_threads=len(ranks)))
        rendezvous = str(directory / "store")
        configs = [rank_config(config, rank, rendezvous, len(ranks)) for rank in ranks]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in ranks]
        self.workers: list[Worker] = [
            thread.submit(make_worker, config).result() for thread, config in zip(self._threads, configs, strict=True)
        ]

    def load_model(self) -> ModelInfo:
        models = self._all(lambda worker: worker.load_model())
        return merged_info(models, self.output_rank, self._num_copies)

    def determine_available_memory(self) -> int:
        return min(self._all(lambda worker: worker.determine_available_memory()))

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        assert pool is None
        return self._all(lambda worker: worker.initialize_kv_cache(kv_cache))[self.output_rank]

    def kv_pool(self) -> KVPool:
        raise AssertionError("no KV moves")

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._begin(lambda worker: worker.execute_model(scheduler_output))

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        return self._begin(lambda worker: await_output(worker.sample_tokens(grammar)))[self.output_rank]

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        raw = [to_raw(arg) for arg in args]
        return [from_raw(each) for each in self._all(lambda worker: call_worker(worker, method, raw))]

    def check_health(self, timeout: float) -> None:
        self._all(lambda worker: worker.check_health())

    def on_failure(self, callback: Callable[[], None]) -> None:
        pass

    def replace_workers(self) -> None:
        raise AssertionError("threads do not end")

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def _begin(self, call: Callable[[Worker], Result]) -> "list[Future[Result]]":
        return [thread.submit(call, worker) for thread, worker in zip(self._threads, self.workers, strict=True)]

    def _all(self, call: Callable[[Worker], Result]) -> list[Result]:
        return [pending.result() for pending in self._begin(call)]


def parallel(tp: int, pp: int = 1, cp: int = 1, pcp: int = 1, *, experts: bool = False) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        decode_context_parallel_size=cp,
        prefill_context_parallel_size=pcp,
        enable_expert_parallel=experts,
    )
