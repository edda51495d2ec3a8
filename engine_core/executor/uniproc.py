"""Runs one worker in the core's own process and thread."""

from collections.abc import Callable

from ..data.errors import ExecutorFailedError
from ..data.handshake import WarmUp
from ..data.kv_cache_config import KVCacheConfig
from ..data.model_info import ModelInfo
from ..data.pending_output import PendingOutput, as_pending
from ..data.scheduler_output import GrammarOutput, SchedulerOutput
from ..kv_transfer.kv_transport import KVPool
from ..wire.serialization import from_raw, to_raw
from .executor import PoolSpec, call_worker
from .worker import Worker


class UniProcExecutor:
    """Implements ``Executor``: the host's work of every call has ended when it returns."""

    max_concurrent_batches = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def load_model(self) -> ModelInfo:
        return self._worker.load_model()

    def determine_available_memory(self) -> int:
        return self._worker.determine_available_memory()

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        memory = pool.allocate() if pool is not None else None
        return self._worker.initialize_kv_cache(kv_cache, memory)

    def kv_pool(self) -> KVPool:
        return self._worker.kv_pool()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._worker.execute_model(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        return as_pending(self._worker.sample_tokens(grammar))

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        return [from_raw(call_worker(self._worker, method, [to_raw(arg) for arg in args]))]

    def check_health(self, timeout: float) -> None:
        try:
            self._worker.check_health()
        except Exception as error:
            raise ExecutorFailedError(f"the worker failed: {error}") from error

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Do nothing: the worker fails only together with this process."""

    def replace_workers(self) -> None:
        """Raise ``ExecutorFailedError``: the worker ends only together with this process."""
        raise ExecutorFailedError("a worker within the core's process cannot be replaced")

    def shutdown(self) -> None:
        self._worker.shutdown()
