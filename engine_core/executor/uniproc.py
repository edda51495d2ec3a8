"""Runs one worker in the core's own process: in its thread, or in another, so that the core schedules while the worker
computes; or simulates a device for benchmarks, which only waits, and keeps its own time while the core does other
work."""

import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..data.errors import ExecutorFailedError, WeightsDamagedError
from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.model_info import ModelInfo
from ..data.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    as_pending,
    await_output,
)
from ..fake_workers.timed_worker import TimedWorker
from ..kv_transfer.kv_transport import KVPool
from ..wire.frames import from_raw, to_raw
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
        except WeightsDamagedError:
            raise
        except Exception as error:
            raise ExecutorFailedError(f"the worker failed: {error}") from error

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Do nothing: the worker fails only together with this process."""

    def replace_workers(self) -> None:
        """Raise ``ExecutorFailedError``: the worker ends only together with this process."""
        raise ExecutorFailedError("a worker within the core's process cannot be replaced")

    def shutdown(self) -> None:
        self._worker.shutdown()


class StepOnThread:
    """Promises the output of a step whose second half runs on the worker's thread. What the device has still to do
    then is waited for on the caller's thread, so that the worker's begins the next step meanwhile."""

    def __init__(self, sampled: "Future[ModelRunnerOutput | PendingOutput]") -> None:
        self._sampled = sampled

    def result(self) -> ModelRunnerOutput:
        return await_output(self._sampled.result())


class ThreadedExecutor(UniProcExecutor):
    """Implements ``Executor``. Every call runs on one thread, because compute libraries keep settings by thread; so
    steps run in the order in which they began."""

    max_concurrent_batches = 2
    """One step computes while the next is scheduled; a third could not begin any sooner."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        # Its queue is bounded: it holds both halves of at most ``max_concurrent_batches`` steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._forward: Future[None] | None = None

    def load_model(self) -> ModelInfo:
        return self._thread.submit(self._worker.load_model).result()

    def determine_available_memory(self) -> int:
        return self._thread.submit(self._worker.determine_available_memory).result()

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        memory = pool.allocate() if pool is not None else None
        return self._thread.submit(self._worker.initialize_kv_cache, kv_cache, memory).result()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._forward = self._thread.submit(self._worker.execute_model, scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        assert self._forward is not None, "execute_model comes first"
        return StepOnThread(self._thread.submit(self._sample, self._forward, grammar))

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        raw_args = [to_raw(arg) for arg in args]
        return [from_raw(self._thread.submit(call_worker, self._worker, method, raw_args).result())]

    def check_health(self, timeout: float) -> None:
        check = self._thread.submit(self._worker.check_health)
        try:
            check.result(timeout)
        except TimeoutError:
            check.cancel()
            raise ExecutorFailedError(f"the worker did not answer within {timeout:g} s") from None
        except WeightsDamagedError:
            raise
        except Exception as error:
            raise ExecutorFailedError(f"the worker failed: {error}") from error

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._worker.shutdown()

    def _sample(self, forward: "Future[None]", grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        forward.result()  # it has ended, because one thread runs both; its error is the step's result
        return self._worker.sample_tokens(grammar)


_PR_SET_TIMERSLACK = 29


class TimedExecutor(UniProcExecutor):
    """Runs steps like a device with a queue: a step begins when it is submitted or when the step before it ends, and
    takes its configured time. Work of the core costs nothing while a step runs, and delays the next one otherwise."""

    def __init__(
        self,
        worker: TimedWorker,
        *,
        overlaps: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``overlaps`` allows a step to be submitted while one runs."""
        super().__init__(worker)
        self.max_concurrent_batches = 2 if overlaps else 1
        self._timed = worker
        self._clock = clock
        self._sleep = sleep
        self._ends_at = 0.0  # of the step submitted last
        self.idle_seconds = 0.0
        """How long the device had nothing to do before the step submitted last; of the first one, without meaning."""
        _wake_in_time()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        submitted_at, ended_at = self._clock(), self._ends_at
        self._timed.begin(scheduler_output)
        begins_at = max(submitted_at, ended_at)
        if scheduler_output.defers_drafts:
            # What depends on the tokens of the step before begins when that one has ended, so its time does not
            # overlap.
            begins_at += self._clock() - submitted_at
        self.idle_seconds = begins_at - ended_at
        self._ends_at = begins_at + self._timed.seconds_of(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        return _Due(self._timed.sample_tokens(grammar), self._ends_at, self._wait_until)

    def _wait_until(self, at: float) -> None:
        if (seconds := at - self._clock()) > 0:
            self._sleep(seconds)


class _Due:
    """Holds the output of a step until the time at which the step ends."""

    __slots__ = ("_at", "_output", "_wait_until")

    def __init__(self, output: ModelRunnerOutput, at: float, wait_until: Callable[[float], None]) -> None:
        self._output = output
        self._at = at
        self._wait_until = wait_until

    def result(self) -> ModelRunnerOutput:
        self._wait_until(self._at)
        return self._output


def _wake_in_time() -> None:
    """Let this thread wake up on time: by default Linux adds up to 50 µs to a sleep, to wake several at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
