"""Defines the protocol between the core and its executors, which methods of workers may be called by name, and how LoRA
adapters are kept in all workers of an executor."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from ..data.errors import RanksDifferError, WorkerLostError
from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.lora import LoraInfo
from ..data.model_info import ModelInfo
from ..data.scheduler_output import GrammarOutput, PendingOutput, SchedulerOutput
from ..kv_cache.pool_memory import PoolMemory
from ..kv_transfer.kv_transport import KVPool
from ..wire.frames import call_with_raw, to_raw
from .worker import Worker

log = logging.getLogger(__name__)

# Names arrive from clients, so what may be called is listed: getattr alone would offer every method of the worker.
CLIENT_METHODS: Final = frozenset({"profile", "resident_bytes"})
"""Methods of workers that clients may call. None of them changes what the core relies on."""
WORKER_METHODS: Final = CLIENT_METHODS | {
    *("load_model", "determine_available_memory", "initialize_kv_cache"),
    *("sleep", "wake_up", "check_weights", "reload_weights", "check_health", "load_lora", "drop_lora"),
    *("execute_dummy_batch", "listen_experts", "join_experts", "leave_experts"),
}
"""Methods of workers that may be called by name. Their arguments and results are msgspec types."""


class PoolSpec(NamedTuple):
    """Says what memory a pool needs whose blocks move."""

    nbytes: int
    """Size of each worker's pool."""
    shared: bool
    """Whether other engines map it."""

    def allocate(self) -> PoolMemory:
        """Allocate the pool of a worker in this process."""
        return PoolMemory.allocate(self.nbytes, self.shared)


class Executor(Protocol):
    """Runs one worker or several. Its methods are called from one thread, in this order: load, determine, initialize,
    then execute and sample for each step."""

    max_concurrent_batches: int
    """How many steps may be in flight at once. At 1, each step ends before the next begins."""

    def load_model(self) -> ModelInfo:
        """Load the weights. Raises ``ValueError`` naming a configured feature that is not supported."""

    def determine_available_memory(self) -> int:
        """Return how many bytes the KV pool may take in the worker that has the least memory."""

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        """Make the pools and warm up the workers. ``pool``: None if no KV moves. Returns the slowest report."""

    def kv_pool(self) -> KVPool:
        """Return the pool for transports, over all workers. Only for pools made with a ``PoolSpec``."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Begin the forward pass of a step; may return before its end. Errors are raised here or by the result."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        """Begin the second half of the latest step: sample its tokens among those that ``grammar`` allows."""

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        """Call a method of ``WORKER_METHODS`` on every worker, after all steps begun so far.

        Returns the results as plain data, by rank. Raises ``ValueError`` for a mistake of the caller, which all workers
        refuse, ``RanksDifferError`` if some workers made the call and others did not, and ``ExecutorFailedError`` for
        any other error in another process.
        """

    def check_health(self, timeout: float) -> None:
        """Check every worker, after all steps begun so far.

        Raises ``ExecutorFailedError`` with the reason if a worker fails or does not answer within ``timeout`` seconds,
        and ``WeightsDamagedError``, after which no worker computes a step.
        A worker in the caller's thread cannot be interrupted: it is only asked.
        """

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when a worker's process ends, because the core may be idle. From then on
        every call raises ``WorkerLostError``, until :meth:`replace_workers` has returned."""

    def replace_workers(self) -> None:
        """End all workers and start others, which load the same weights and have empty KV pools. No step may be in
        flight.

        Raises ``ExecutorFailedError`` if these workers cannot be replaced, or if a new one does not start.
        """

    def shutdown(self) -> None:
        """End the workers. Idempotent."""


def call_worker(worker: Worker, method: str, args: Sequence[msgspec.Raw]) -> msgspec.Raw:
    """Call ``method`` with arguments decoded to the types it annotates.

    Raises ``ValueError`` for a name that is not declared, or that this kind of worker lacks.
    """
    function: Callable[..., object] | None = getattr(worker, method, None) if method in WORKER_METHODS else None
    if function is None:
        raise ValueError(
            f"{type(worker).__name__} has no method {method!r} to call; declared: {sorted(WORKER_METHODS)}"
        )
    return to_raw(call_with_raw(function, args))


class WorkerAdapters:
    """Fulfils :class:`..scheduling.adapters.AdapterStore`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kept: set[bytes] = set()  # digests that every worker holds
        # Digests that some workers may still hold although nothing needs them; bounded by the drops that have failed.
        self._left: dict[bytes, None] = {}

    def load(self, path: str) -> LoraInfo:
        try:
            infos = msgspec.convert(self._executor.collective_rpc("load_lora", path), list[LoraInfo])
        except RanksDifferError as error:
            self._drop_new(msgspec.convert(error.results, list[LoraInfo]))
            if error.is_refused:
                raise ValueError(f"{path}: only some workers accept these files: {error}") from error
            raise
        # Each worker reads the files itself: a file that is replaced between two reads would give the ranks two
        # adapters.
        if any(info != infos[0] for info in infos):
            self._drop_new(infos)
            raise ValueError(f"{path}: the files changed while they were read; retry")
        self._kept.add(infos[0].digest)
        self._left.pop(infos[0].digest, None)
        return infos[0]

    def drop(self, digest: bytes) -> None:
        self._kept.discard(digest)
        self._left[digest] = None
        for each in list(self._left):
            self._try_to_drop(each)

    def _try_to_drop(self, digest: bytes) -> None:
        """Let all workers forget an adapter; the next drop tries again if that fails. What a worker holds too much only
        costs memory: it may not end any request."""
        try:
            self._executor.collective_rpc("drop_lora", digest)
        except WorkerLostError:
            pass  # new workers load only what is needed: the next step notices the loss
        except Exception as error:
            log.error("some workers may keep the adapter %s that nothing needs: %s", digest.hex(), error)
            return
        del self._left[digest]

    def _drop_new(self, infos: list[LoraInfo]) -> None:
        """Let the workers that have read an adapter which others have not forget it again."""
        for digest in dict.fromkeys(info.digest for info in infos):
            if digest not in self._kept:
                self.drop(digest)
