"""The protocol that the core knows its workers by."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from ..kv_cache.pool_memory import PoolMemory
from ..kv_transfer.kv_transport import KVPool
from ..wire.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from ..wire.serialization import call_with_raw, to_raw
from ..worker import ModelInfo, Worker

CLIENT_METHODS: Final = frozenset({"profile", "resident_bytes"})
"""What a core's clients may call too: nothing that the core must know of."""
WORKER_METHODS: Final = CLIENT_METHODS | {
    *("load_model", "determine_available_memory", "initialize_kv_cache"),
    *("sleep", "wake_up", "reload_weights"),
}
"""What may be called by name; arguments and results are msgspec types."""


class PendingOutput(Protocol):
    """What a step is going to produce (a ``concurrent.futures.Future`` is one)."""

    def result(self) -> ModelRunnerOutput:
        """Waits for it; raises what went wrong in any half of the step."""


class Executor(Protocol):
    """One worker or several behind the same calls. Called from one thread, in this order: load, determine, initialize,
    then execute, sample, …"""

    max_concurrent_batches: int
    """Steps that may be under way at once. 1: each has ended before the next begins."""

    def load_model(self) -> ModelInfo:
        """Loads weights. Raises ``ValueError`` naming a configuration feature that is not supported."""

    def determine_available_memory(self) -> int:
        """Bytes that this engine's KV pool may take, in the worker that has least."""

    def initialize_kv_cache(self, num_blocks: int, memory: PoolMemory | None = None) -> None:
        """Makes the pools; afterwards the workers are warm. ``memory`` as for a worker."""

    def kv_pool(self) -> KVPool:
        """The pool as transports see it."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Begins a step's forward pass, and may return before it ends. What goes wrong is raised here or by the
        step's result."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        """Ends the step begun last: its tokens will be drawn under what ``grammar`` allows."""

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        """Calls a method of ``WORKER_METHODS`` on every worker, after all steps begun so far.

        Returns their results as plain data, by rank. Raises ``ValueError`` for the caller's mistakes; what else went
        wrong in another process is an ``ExecutorFailedError``.
        """

    def on_failure(self, callback: Callable[[], None]) -> None:
        """``callback`` is called, from any thread, when a worker is gone: the core may be asleep. From then on every
        call raises ``ExecutorFailedError``."""

    def shutdown(self) -> None:
        """Ends the workers. Idempotent."""


def call_worker(worker: Worker, method: str, args: Sequence[msgspec.Raw]) -> msgspec.Raw:
    """Calls ``method`` with arguments decoded to the types it annotates. Raises ``ValueError`` for a name that is not
    declared, or that this kind of worker has not."""
    function: Callable[..., object] | None = getattr(worker, method, None) if method in WORKER_METHODS else None
    if function is None:
        raise ValueError(
            f"{type(worker).__name__} has no method {method!r} to call; declared: {sorted(WORKER_METHODS)}"
        )
    return to_raw(call_with_raw(function, args))
