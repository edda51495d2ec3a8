"""Configuration of an engine core: small frozen structs, each handed only to the part that needs it."""

import msgspec


class WorkerConfig(msgspec.Struct, frozen=True):
    """What the worker loads and how it computes."""

    model: str
    """A local checkpoint directory. The hash worker needs none; of one it reads vocabulary size and context length."""
    worker: str = "cpu"
    """``cpu`` (gpu_worker, with a model), ``hash`` (no model: the next token is a hash of the prefix) or ``timed`` (a
    step only waits)."""
    device: str = "auto"
    """Where the model computes: ``cpu``, ``cuda``, or ``auto``, which is a GPU where there is one."""
    dtype: str = "auto"
    """``auto`` keeps the checkpoint's dtype; else ``float32`` or ``bfloat16``."""
    quantization: str | None = None
    """``int8-dynamic`` rounds the layers' matrices to int8 as they are loaded; None: they stay as they are."""
    attention_backend: str = "auto"
    """``auto`` (the fastest that works here), ``cpu`` (C++ kernels), ``torch`` or ``reference``."""
    num_threads: int = 0
    """Compute threads; 0 leaves the library's choice."""
    step_seconds: float = 0.0
    """Hash and timed worker only: how long a step takes."""
    token_seconds: float = 0.0
    """Likewise: how much longer for each token that the step computes."""
    compute_nans_in_logits: bool = False
    """Whether NaN logits are counted, at the cost of a look at every logit."""
    profiler_dir: str = ""
    """Where profiles are written; empty: there are none."""


class CacheConfig(msgspec.Struct, frozen=True):
    """The paged KV cache."""

    block_size: int = 16
    """Tokens in a block."""
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    """Fixes the size of the pool; None: from memory."""
    memory_bytes: int | None = None
    """KV pool size in bytes; None: from the memory that is free after the profile run."""
    engines_on_host: int = 1
    """How many engines share this host's memory."""
    kv_events: bool = False
    """Whether outputs tell what the prefix cache gains and loses."""
    block_hash_seed: bytes = b""
    """Root of the block hash chain, as in ``Fingerprint.block_hash_seed``."""


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits of one step."""

    max_num_seqs: int = 128
    """Requests in a batch."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    prefill_tokens_beside_decode: int | None = None
    """Of the budget, what prompts get in a step where others decode, for each request whose prompt waits; None: all."""
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False
    """Whether the next step is scheduled while one runs, before its tokens are known."""
    policy: str = "fcfs"
    """``fcfs`` or ``priority``: see ``SchedulingPolicy``."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in a step at most, so that short prompts get past long ones; 0: as many as fit."""
    reserve_full_prompt: bool = True
    """Admit a request only when all its tokens fit, not just those of its first step: two long prompts that are let in
    together might only preempt each other."""
    log_events: bool = False
    """Whether outputs tell when their requests were queued, scheduled and preempted."""
    watermark: float = 0.01
    """Share of the blocks that a newcomer leaves free while others run, for their next tokens."""


class TLSFiles(msgspec.Struct, frozen=True):
    """Where a part's certificate is, in PEM."""

    ca: str
    cert: str
    key: str
    peer_name: str
    """What the certificates of those who may connect, or be connected to, name."""


class KVConfig(msgspec.Struct, frozen=True):
    """KV blocks that move: between engines under leases, and out of the pool and back."""

    role: str = "both"
    """``prefill``, ``decode`` or ``both``: what kind of memory the pool lives in."""
    transports: tuple[str, ...] = ()
    """Ways to read another engine's blocks, best first, or ``auto``; empty: blocks do not move between engines."""
    socket_listen: str = ""
    """Where the transport ``socket`` serves: ``host:port``; empty: a unix socket, for readers on this host."""
    socket_advertise: str = ""
    """The host that readers connect to, where it is not the one that is listened on."""
    socket_tls: TLSFiles | None = None
    """None: the socket transport stays on this host."""
    policy: str = "recompute"
    """When blocks cannot be loaded: ``recompute`` them here, or ``fail`` the request with an error worth a retry."""
    checksum: bool = False
    """Whether owner and reader compare a CRC-32 of every block."""
    lease_seconds: float = 30.0
    """How long the blocks of a finished prefill are held unless the reader renews."""
    load_timeout_seconds: float = 30.0
    """How long a load may stand still before it is given up."""
    offload_path: str = ""
    """Directory of the file that evicted prefix blocks go to; empty: they are dropped."""
    offload_bytes: int = 0
    """How large that file may become."""
    failpoints: tuple[str, ...] = ()
    """Faults to inject, for tests: ``name=share`` each (see ``failpoints.py``)."""


class StructuredOutputConfig(msgspec.Struct, frozen=True):
    """How outputs are made to follow a grammar."""

    tokenizer: str
    """Path of the model's ``tokenizer.json``."""
    tokenizer_digest: bytes
    """SHA-256 of that file: whoever loads it later makes sure that it is still the same."""
    eos_token_ids: tuple[int, ...] = ()
    """Of the checkpoint; empty: what the tokenizer itself says."""
    backend: str = "llguidance"
    """``llguidance`` or ``xgrammar``."""


class ParallelConfig(msgspec.Struct, frozen=True):
    """Where the workers are, and how arrays get from process to process."""

    distributed_executor_backend: str = "uni"
    """``uni``: one, in the core's process; ``mp``: in processes of their own."""
    array_arena_bytes: int = 256 << 20
    """Shared memory for large arrays that a client lends its core, and as much again for those that an executor lends
    its workers. What has no room there travels in frames; 0: everything does."""


class ObservabilityConfig(msgspec.Struct, frozen=True):
    """What the loop tells of its steps."""

    log_iterations: bool = False
    """Whether each step is a line in the log."""
    dump_dir: str = ""
    """Directory that gets a file with the scheduler's input of a step that failed; empty: only the log has it."""
    dump_tokens: bool = False
    """Whether that may name tokens of prompts and outputs."""


class EngineConfig(msgspec.Struct, frozen=True):
    """All of it, as INIT carries it to the core's process."""

    worker: WorkerConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv: KVConfig = KVConfig()
    parallel: ParallelConfig = ParallelConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    structured_output: StructuredOutputConfig | None = None
    """None: the model has no tokenizer to constrain outputs by."""
    max_model_len: int | None = None
    """Prompt and output together; None: the model's own, or what the KV pool can hold if that is less."""
