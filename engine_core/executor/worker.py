"""Defines the protocol of a worker, which ``gpu_worker`` and ``fake_workers`` implement."""

from collections.abc import Sequence
from typing import Protocol

from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.lora import LoraInfo
from ..data.model_info import FreedMemory, ModelInfo
from ..data.parallel_config import ExpertPeers
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from ..kv_cache.pool_memory import PoolMemory
from ..kv_transfer.kv_transport import KVPool


class Worker(Protocol):
    """Computes steps. One thread calls load, determine, initialize, then execute and sample for each step."""

    def load_model(self) -> ModelInfo:
        """Load the weights. Raises ``ValueError`` naming a configured feature that is not supported."""

    def determine_available_memory(self) -> int:
        """Return how many bytes the KV pool may take, after a profile run with the largest chunk and its logits."""

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, memory: PoolMemory | None = None) -> WarmUp:
        """Make the pool and the buffers of steps, and compute steps of the sizes that will run. Returns which.

        Args:
            kv_cache: The number of blocks, and the context length that was fitted to them.
            memory: Memory for the pool, of at least ``ModelInfo.pool_bytes``. If None, the worker allocates its own,
                which no other process can map.
        """

    def kv_pool(self) -> KVPool:
        """Return the pool for transports. Callable from any thread, after ``initialize_kv_cache``."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of one step.

        An exception, here or in ``sample_tokens``, means that the step is lost and the engine must stop.
        """

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        """End the latest step: sample a token for each of its requests whose tokens are all computed.

        A worker whose device samples returns a promise without waiting for it: the next step may then begin before the
        tokens are on the host. Any thread may wait for the promise.

        This is separate from the forward pass, so that the bitmasks of grammars are computed while the model runs.
        """

    def sleep(self, level: int) -> FreedMemory:
        """Release the memory of the KV pool and of the weights, and return how much that was. No request holds a block.

        Args:
            level: At 1, :meth:`wake_up` restores the weights; at 2, only :meth:`reload_weights` does.
        """

    def wake_up(self, tags: Sequence[str]) -> None:
        """Restore ``weights``, ``kv_cache`` (which is then empty) or both. A part that is awake does not change.

        Raises ``ValueError``, and changes nothing, if the weights cannot be restored unchanged.
        """

    def check_weights(self, path: str) -> None:
        """Check that :meth:`reload_weights` could load this checkpoint, without reading all of it. Changes nothing.

        All workers check before any of them reloads. Raises ``ValueError`` naming what is wrong with the checkpoint.
        """

    def reload_weights(self, path: str) -> None:
        """Load the weights of another checkpoint of the same architecture, awake or asleep. No request holds a block.

        Refuses files that have changed since :meth:`check_weights`. After an error it is unknown which weights are
        left, and another call must load some.
        """

    def load_lora(self, path: str) -> LoraInfo:
        """Keep the LoRA adapter in the directory ``path`` in host memory, awake or asleep.

        Raises ``ValueError`` naming what is wrong with it, or not supported.
        """

    def drop_lora(self, digest: bytes) -> None:
        """Forget an adapter, if it is there. No request of a later step names it."""

    def profile(self, start: bool, prefix: str = "") -> None:
        """Start recording what the worker computes, or stop and write the profile to the configured directory, into a
        file whose name begins with ``prefix``.

        Raises ``ValueError`` without a directory, when starting twice, when stopping without a start, and for a prefix
        that is no part of a name.
        """

    def execute_dummy_batch(self) -> None:
        """Compute a step of one token in block ``NULL_BLOCK``, because other ranks of the data-parallel group compute a
        step and this one has no request."""

    def listen_experts(self, host: str) -> str:
        """Take connections of the workers with which this one shares the experts of the data-parallel group. Returns
        ``HOST:PORT``, at which they reach it until it ends. ``host``: the address of its machine."""

    def join_experts(self, peers: ExpertPeers) -> None:
        """Take the experts that this worker has among ``peers``, loading those that it lacks, and wait until all have
        joined. From then on all of them compute their steps together.

        Raises ``PeerLostError`` if one of them ends meanwhile, ``ValueError`` if the experts cannot be loaded."""

    def leave_experts(self) -> None:
        """End the connections to the workers that share the experts, so that none of them waits for this one."""

    def check_health(self) -> None:
        """Raise an exception if the worker cannot compute, ``WeightsDamagedError`` if its weights have changed by
        themselves: from then on every step raises that too."""

    def resident_bytes(self) -> int:
        """Return the resident memory of the worker's process, in bytes."""

    def shutdown(self) -> None:
        """Release all resources. Idempotent."""
