"""The protocols that a worker and an executor fulfil (``gpu_worker`` and ``hash_worker`` do)."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from .kv_cache.pool_memory import PoolMemory
from .kv_transfer.kv_transport import KVPool
from .wire.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput


class ModelInfo(msgspec.Struct, frozen=True):
    """What the core must know of a loaded model."""

    vocab_size: int
    max_model_len: int
    """Of the model itself, in tokens."""
    kv_bytes_per_token: int
    """Of all layers."""
    kv_layout: str
    """As in ``Fingerprint.kv_layout``: all that must be equal for two pools to exchange blocks, block size included."""
    numerics: str
    """As in ``Fingerprint.numerics``."""
    hidden_size: int = 0
    """Columns of prompt embeddings."""


class Worker(Protocol):
    """Computes steps. Called from one thread, in this order: load, determine, initialize, then execute, sample, …"""

    def load_model(self) -> ModelInfo:
        """Loads weights. Raises ``ValueError`` naming a configuration feature that is not supported."""

    def determine_available_memory(self) -> int:
        """Bytes that this engine's KV pool may take, after a profile run with the largest chunk and its logits."""

    def initialize_kv_cache(self, num_blocks: int, memory: PoolMemory | None = None) -> None:
        """Makes the pool; afterwards the worker is warm.

        Args:
            memory: To hold the pool, of at least ``num_blocks * block_size * kv_bytes_per_token`` bytes; None: the
                worker allocates its own, which no other process can map.
        """

    def kv_pool(self) -> KVPool:
        """The pool as transports see it. After ``initialize_kv_cache``; usable from any thread."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """The forward pass of one step. An exception, here or in ``sample_tokens``, means that the step is lost and
        the engine is to stop."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Ends the step that was executed last: draws a token for every request of it whose tokens are all computed.

        Apart from the forward pass, so that what grammars allow is worked out while the model runs.
        """

    def sleep(self, level: int) -> None:
        """Gives memory back to the system: the KV pool's content, and the weights. No request holds a block.

        Args:
            level: 1: the weights come back with :meth:`wake_up`; 2: only :meth:`reload_weights` brings some.
        """

    def wake_up(self, tags: Sequence[str]) -> None:
        """Takes ``weights`` or ``kv_cache``, which is empty then, or both into use again; what is awake stays so.

        Raises ``ValueError`` when the weights cannot be the same again; nothing has changed then.
        """

    def reload_weights(self, path: str) -> None:
        """Takes the weights of another checkpoint of the same architecture, awake or asleep. No request holds a block.

        Raises ``ValueError`` naming what is wrong with it; the old weights stay then.
        """

    def profile(self, start: bool) -> None:
        """Starts to record what the worker computes, or stops and writes it to the configured directory.

        Raises ``ValueError`` without one, or when it was not the other's turn.
        """

    def resident_bytes(self) -> int:
        """Memory of the worker's process that the system holds for it now."""

    def shutdown(self) -> None:
        """Gives everything back. Idempotent."""
