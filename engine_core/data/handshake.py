"""Messages between a starting core and its client: hello, the configuration, and ready or failed."""

import msgspec

from ..wire.array_arena import ArenaAddress
from .config import EngineConfig
from .core_params import ModelPooling
from .lora import LoraState
from .model_info import MediaTraits


class CoreHello(msgspec.Struct, tag="HELLO"):
    """Core to client: the process has started."""

    pid: int


class CoreInit(msgspec.Struct, tag="INIT"):
    """Client to core: the configuration, and which sockets to use."""

    connection_fd: int
    """Inherited descriptor of the socket for requests and outputs."""
    config: EngineConfig
    kv_address: str = ""
    """Address of the socket pair for ``kv_messages``; empty if this core transfers no KV."""
    arrays: ArenaAddress | None = None
    """Shared memory for large arrays of requests; None if they are sent in frames."""
    pulse_fd: int | None = None
    """Inherited descriptor of the memory in which the core shows that its steps end; None if no client looks."""
    is_placed: bool = False
    """Whether the core is to run in this process, wherever the configuration says; its place has been chosen."""
    meeting: tuple[str, bytes] | None = None
    """Where the ranks of the core's data-parallel group meet, and their secret; None: as the configuration says."""


class WarmUp(msgspec.Struct, frozen=True):
    """Reports what a worker computed at start-up, so that the first requests find warm code."""

    seconds: float = 0.0
    decode_batches: list[int] = []
    """Numbers of requests in the decode steps."""
    prefill_tokens: int = 0
    """Tokens of the largest step, which fills the token budget with prompts."""
    sampled_rows: int = 0
    """Most rows for which the sampler sampled tokens."""
    activation_bytes: int = 0
    """Memory that the largest step needs in addition to weights and KV blocks."""
    free_rows: int = 0
    """Most tokens of a decode step that takes hardly longer than a step of one token; 0: not measured."""
    is_remembered: bool = False
    """Whether an engine before this one has computed the largest step and measured its memory, and this one has not."""

    def __str__(self) -> str:
        batches = ", ".join(map(str, self.decode_batches)) or "none"
        step = "the remembered time and memory of a prefill step" if self.is_remembered else "a prefill step"
        return (
            f"{self.seconds:.1f} s, decode steps of {batches} requests, {step} of {self.prefill_tokens} tokens "
            f"with {self.activation_bytes >> 20} MiB of activations, and the sampler for {self.sampled_rows} rows"
            + (f"; steps of up to {self.free_rows} rows take hardly longer than one of 1" if self.free_rows else "")
        )


class CoreReady(msgspec.Struct, tag="READY"):
    """Core to client: the model is loaded and the KV pool is allocated."""

    num_kv_blocks: int
    max_model_len: int
    """The limit after it was fitted to the KV pool."""
    vocab_size: int
    block_size: int
    kv_layout: str
    """As in ``Fingerprint.kv_layout``."""
    numerics: str
    """As in ``Fingerprint.numerics``."""
    hidden_size: int = 0
    """Number of columns of prompt embeddings."""
    num_state_slots: int = 0
    """As in ``KVCacheConfig.num_state_slots``."""
    state_boundary: int = 0
    """States are kept after multiples of so many tokens; 0: no layer keeps one."""
    warm_up: WarmUp = WarmUp()
    """What the slowest worker computed before it was ready."""
    experts_per_token: int = 0
    """As in ``ModelInfo``."""
    finds_reasoning: bool = False
    """Whether the marks around the model's reasoning are known."""
    num_kv_groups: int = 1
    """How many of the pool's blocks hold the KV of one block of tokens."""
    loras: list[LoraState] = []
    """The LoRA adapters that were loaded at start, by name."""
    pooling: ModelPooling = ModelPooling()
    """As in ``ModelInfo``."""
    pool_is_on_host: bool = True
    """As in ``ModelInfo``."""
    media: MediaTraits | None = None
    """As in ``ModelInfo``."""
    parallel_config_hash: bytes = b""
    """A digest of what the ranks of the data-parallel group must share; empty: there is no group."""
    has_waves: bool = False
    """Whether the core computes in waves with the other ranks of its data-parallel group."""
    num_threads: int = 0
    """As in ``ModelInfo``."""
    argument_schemas: list[str] = []
    """As in ``ModelInfo``."""
    fall_backs: list[tuple[str, str]] = []
    """What core and workers do without: kinds and details, as in :mod:`tokenloom.process.fall_backs`."""


class CoreFailed(msgspec.Struct, tag="FAILED"):
    """Core to client: start-up failed, with a message for the operator.

    Attributes:
        permanent: Whether the configuration or the checkpoint is wrong, so that another start would fail too.
    """

    error: str
    permanent: bool = False
