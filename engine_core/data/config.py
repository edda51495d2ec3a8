"""Configuration of an engine core: small frozen structs, each handed only to the part that needs it.

A field that is ``Annotated`` with a text is an option that users can set. Its name, type, default, bounds, choices and
text stand here only: flags, environment variables, configuration files, the keywords of ``LLM`` and the reference page
derive from them (``services/runtime/host/options.py`` says how, and what ``extra`` may hold). The other fields are
filled in at start-up.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenloom.process.plugins import check_named, plugged
from tokenloom.request.reasoning import PARSERS, ReasoningMarks

from .kv_config import KVConfig as KVConfig
from .kv_config import TLSFiles as TLSFiles
from .lora import LoraConfig as LoraConfig
from .parallel_config import EplbConfig as EplbConfig
from .parallel_config import ParallelConfig as ParallelConfig


class PoolerConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a prompt becomes a vector; None: as the checkpoint says. Users write it as JSON (names as in vLLM)."""

    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = None
    """Which hidden states make the vector: the last token's, the mean of all, or the first token's."""
    normalize: bool | None = None
    """Whether vectors have length 1 unless a request says otherwise."""
    use_activation: bool | None = None
    """Whether the logits of a class head become probabilities unless a request says otherwise."""


class SpeculativeConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drafted that one step of the model verifies. Users write it as JSON (names as in vLLM)."""

    method: Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]
    """ngram: tokens that followed the same tokens earlier in the prompt or output; suffix: those that followed them
    most often, in past answers of the tenant too; draft_model: a small model of the same vocabulary; eagle: a head on
    the model's hidden states; eagle3: one on those of three layers; mtp: the head that checkpoints bring."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] = 6
    """Most drafts of a request in a step."""
    model: str = ""
    """Checkpoint directory or hub id of the draft model or head; not for ngram, suffix and mtp."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 5
    """ngram: the longest sequence that is looked up."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    """ngram: the shortest one."""
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=64)] = 24
    """suffix: most tokens of a sequence that is looked up and of its drafts together."""
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 10_000
    """suffix: most past answers that are kept, of all tenants together; 0: each request looks in its own tokens."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0.0, le=32.0)] = 1.0
    """suffix: most drafts for each token of the sequence that was found."""
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    """suffix: drafts end before one that a smaller share of what was found agrees with."""
    rejection_sample_method: Literal["strict", "probabilistic"] = "strict"
    """strict: a draft counts if it equals the token drawn at its position, so no token changes; probabilistic:
    rejection sampling, which keeps the distribution but not the tokens."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for settings that contradict each other."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max is {self.prompt_lookup_max}; the "
                "first must not be above the second"
            )
        if self.has_files and not self.model:
            raise ValueError(f"model: the method {self.method} needs the checkpoint that drafts")
        if self.model and not self.has_files:
            raise ValueError(f"model: the method {self.method} has no model of its own; use draft_model or eagle")

    @property
    def has_files(self) -> bool:
        """Return whether ``model`` names what drafts."""
        return self.method in ("draft_model", "eagle", "eagle3")

    @property
    def writes_kv(self) -> bool:
        """Return whether what drafts has layers, whose KV lies in the pool."""
        return self.method not in ("ngram", "suffix")


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
MODEL_IMPLS = ("auto", "native", "transformers")
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("auto", "cpu", "torch", "triton", "flashinfer", "flash-attn", "reference")
DEVICES = ("auto", "cpu", "cuda", "xpu")
ProcessorLevel = Literal["auto", "x86-64-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3-vnni", "x86-64-v3", "aarch64"]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Duration = Annotated[float, Meta(ge=0)]


class WorkerConfig(Struct, frozen=True):
    """The model to load and how the worker computes it."""

    model: Annotated[str, "Checkpoint directory, Hugging Face hub id, or tokenloom-demo."] = ""
    worker: Annotated[
        Literal["model", "hash", "timed"],
        "model computes the model on --device; hash needs no model and derives each token from a hash "
        "of the prefix, for tests; timed only waits, for benchmarks.",
        Meta(extra={"renamed": {"cpu": "model"}}),
    ] = "model"
    device: Annotated[
        str,
        "Where the model computes; auto: on a GPU (cuda) if one is available; xpu: on a GPU of Intel, operation by "
        "operation; or a plugin, as PACKAGE:NAME.",
        Meta(extra=plugged("platforms", DEVICES)),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        "Number format of weights and activations, float16 on a GPU only; auto: the checkpoint's, bfloat16 if float16.",
    ] = "auto"
    quantization: Annotated[
        Literal["int8-dynamic", "int4", "fp8"] | None,
        "On a GPU fp8: round the layers' weights to 8-bit floats at load, and inputs of many rows row by row. On a CPU "
        "int8-dynamic: round the layers' weights to int8 at load and their inputs row by row; int4: round weights to 4 "
        "bits by groups of 32 inputs, those of the output layer to 8 bits.",
    ] = None
    model_impl: Annotated[
        str,
        "Which code computes the model: native: the architectures that are built in; transformers: the modules of that "
        "library over the paged KV cache; a plugin that adds an architecture, as PACKAGE:CLASS; auto: native where the "
        "architecture and the features that its configuration asks for are built in, otherwise a plugin that adds the "
        "class, otherwise transformers.",
        Meta(extra=plugged("model_architectures", MODEL_IMPLS)),
    ] = "auto"
    load_format: Annotated[
        str,
        "auto: weights from files; dummy: random ones in the shapes of config.json, to measure a model without files; "
        "or a plugin that reads files of another format, as PACKAGE:NAME.",
        Meta(extra=plugged("checkpoint_formats", LOAD_FORMATS)),
    ] = "auto"
    language_model_only: Annotated[
        bool,
        "Serve the text of a model that reads images or sound too, without the weights of its other parts; of no "
        "effect on a model that only reads text.",
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        "What the model serves: generate: text; pooling: embeddings, classes or scores; auto: what its class does, and "
        "embeddings in addition if the checkpoint has the files of sentence-transformers, or with --pooler-config.",
    ] = "auto"
    pooler_config: Annotated[
        PoolerConfig | None,
        "How a prompt becomes a vector: a JSON object with pooling_type (LAST, MEAN or CLS), normalize and "
        "use_activation; by default as the checkpoint says.",
    ] = None
    attention_backend: Annotated[
        str,
        "How attention is computed; auto: on a CPU with C++ kernels if they can be built, on a GPU with Triton's "
        "kernels, otherwise torch; flashinfer and flash-attn: on a GPU with the kernels of that library, where it is "
        "installed; or a plugin, as PACKAGE:NAME. Where layers keep a state, auto sums in bfloat16 on a "
        "CPU in an order that is the same in every batch, for prompts and drafts, and cpu in one that suits the batch.",
        Meta(extra=plugged("attention_backends", ATTENTION_BACKENDS)),
    ] = "auto"
    state_prompts: Annotated[
        Literal["auto", "scan", "chunks", "fla"],
        "How a GPU computes prompts of layers that keep a state; scan: one token after the other, so that all that "
        "decoding leaves can be hit; chunks: 64 tokens at once, so that prompts are cut at multiples of 64 and only "
        "their own states and KV are hit; fla: the same with the package fla-core; auto: chunks where Triton's kernels "
        "compute, states have at most 256 elements a row, and steps have room for chunks, otherwise scan, as on a CPU.",
    ] = "auto"
    processor_level: Annotated[
        ProcessorLevel,
        "Instructions that the CPU's products and kernels may use, to compare them on one processor; auto: all that it "
        "has.",
    ] = "auto"
    num_threads: Annotated[Size, "Compute threads; 0: the library decides."] = 0
    cpus: Annotated[tuple[Size, ...], "Cores that the worker is bound to, by number; by default any."] = ()
    place_on_host: Annotated[
        Size,
        "Number of this engine among those of the host: on a host with several GPUs each engine computes on the next "
        "ones, as many as it has workers, and after the last GPU the first one follows.",
    ] = 0
    step_seconds: Annotated[
        Duration, "Seconds that a step of the hash or timed worker takes.", Meta(extra={"name": "hash_step_seconds"})
    ] = 0.0
    token_seconds: Annotated[
        Duration,
        "Additional seconds of such a step for each token that it computes.",
        Meta(extra={"name": "hash_token_seconds"}),
    ] = 0.0
    draft_accuracy: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        "Share of the hash worker's drafts that are right, with --speculative-config.",
        Meta(extra={"name": "hash_draft_accuracy"}),
    ] = 0.7
    cpu_offload_gb: Annotated[
        # Bounded by a pebibyte, so that the number of bytes is an integer of 64 bits.
        Annotated[float, Meta(ge=0, le=1 << 20)],
        "GiB of the weights of each worker on a GPU that stay in memory of the host, from which the GPU reads them "
        "over its bus in every step: for a model that its own memory does not hold.",
    ] = 0.0
    compute_nans_in_logits: Annotated[
        bool, "Count NaN logits (metric vllm:corrupted_requests), at the cost of reading every logit."
    ] = False
    logits_metrics_interval: Annotated[
        Size,
        "Measure the logits of one step of so many for the metrics tokenloom_logits_… and tokenloom_temperature; "
        "0: never, and no such metrics.",
    ] = 0
    enforce_eager: Annotated[
        bool,
        "Compute every step operation by operation; by default a CPU runs decode steps from recordings of their kernel "
        "calls, and a GPU from graphs, which gives the same tokens sooner.",
    ] = False
    disable_cascade_attn: Annotated[
        bool,
        "Let every request of a GPU's decode step read all of its keys. With false, requests that begin with the same "
        "cached blocks read these together where that pays by counting: in steps that Triton's attention computes from "
        "graphs, of which there is then a second one for each size from 8 requests on. It has not been measured on a "
        "GPU. A CPU reads such blocks once in any case.",
    ] = True
    batch_invariant: Annotated[
        bool,
        "Give the logits and log probabilities of a request the same bits whatever else is in the batch, however its "
        "prompt is cut, with or without a cached prefix and drafts: as one order of sums for each token, with the C++ "
        "kernels of a CPU. Long prompts take longer.",
    ] = False
    weights_scrub_seconds: Annotated[
        Duration,
        "Seconds in which all weights in memory are compared once with the checksums that they had when they were "
        "loaded; an engine whose weights have changed ends, and the next process reads them anew. 0: never.",
    ] = 0.0
    warm_up_dir: Annotated[
        str,
        "Folder in which an engine on a CPU keeps what its warm-up has measured, so that a later one with the same "
        "model and options starts without measuring it; empty: every start measures.",
    ] = ""
    profiler_dir: Annotated[str, "Directory for profiles; empty: requests to profile are refused."] = ""


class CacheConfig(Struct, frozen=True):
    """The paged KV cache."""

    block_size: Annotated[Count, "Tokens in a KV block."] = 16
    dtype: Annotated[
        KVCacheDtype,
        "Number format of keys and values; auto: that of the activations; in half the memory of bfloat16 on a GPU fp8: "
        "8-bit floats (e4m3), with the scales of a checkpoint or none, and on a CPU int8: 8 bits, with a scale for "
        "each head of each token.",
        Meta(
            extra={
                "name": "kv_cache_dtype",
                "renamed": {"fp8_e4m3": "fp8"},
                "unsupported": dict.fromkeys(
                    ("fp8_e5m2", "fp8_inc"), "only fp8 (e4m3) is supported; it takes the same memory"
                ),
            }
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, "Reuse the KV blocks of equal prefixes."] = True
    num_blocks: Annotated[
        Count | None,
        "KV blocks, on any device; by default as many as memory allows.",
        Meta(extra={"name": "num_kv_blocks", "aliases": ("num_gpu_blocks_override",)}),
    ] = None
    memory_bytes: Annotated[
        Count | None,
        "Bytes of the KV cache; by default from the memory free after a profile run.",
        Meta(extra={"name": "kv_cache_memory", "aliases": ("kv_cache_memory_bytes",)}),
    ] = None
    state_memory_bytes: Annotated[
        Count | None,
        "Bytes of the KV cache's memory that hold the states of layers that keep one; by default a share by how many "
        "tokens' KV a state is as large as. Refused for a model without such layers.",
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        "Share of a GPU's memory for the weights, activations and KV of all engines on it; of no effect on a CPU.",
    ] = 0.9
    engines_on_host: Annotated[
        Count,
        "Engines of this host, which share its memory, or that of a GPU that several of them take; by default each "
        "plans KV blocks for its part.",
    ] = 1
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        "Keep the KV of the whole context in every layer, also in layers that attend to a window only.",
    ] = False
    kv_events: Annotated[
        bool,
        "Publish which blocks the prefix cache stores and removes. The coordinator follows it, so that evicted blocks "
        "attract no prompts.",
    ] = False
    block_hash_seed: bytes = b""
    """Root of the block hash chain, as in ``Fingerprint.block_hash_seed``."""


class MediaLimits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many images, sounds and videos a prompt may have. Users write it as JSON (names as in vLLM)."""

    image: Annotated[int, Meta(ge=0)] = 999
    audio: Annotated[int, Meta(ge=0)] = 999
    video: Annotated[int, Meta(ge=0)] = 999


class SchedulerConfig(Struct, frozen=True):
    """Limits of one step and the order of requests."""

    # As in vLLM's servers on large GPUs. The products of an 8B are as fast with 1,024 rows on an H200, but experts and
    # small models gain from more.
    max_num_seqs: Annotated[Count, "Requests in a batch.", Meta(extra={"on_gpu": 256})] = 128
    max_num_batched_tokens: Annotated[Count, "Token budget of a step.", Meta(extra={"on_gpu": 8192})] = 2048
    prefill_tokens_beside_decode: Annotated[
        Count | None,
        "Prompt tokens in a step in which other requests decode, until the costs of both are measured. Then prompts "
        "may slow down those that decode as much as they are slowed down themselves; half as many, and 60 ms for all "
        "that decode together, are always allowed. none: no limit.",
    ] = None
    enable_chunked_prefill: Annotated[bool, "Let the prefill of a prompt take several steps."] = True
    async_scheduling: Annotated[
        bool | None,
        "Schedule the next step while one runs; by default where the model computes on a GPU (cuda), unless that "
        "takes more steps. Of no use on a CPU.",
    ] = None
    overlaps_by_default: bool = False
    """Whether no option asks for ``async_scheduling``: steps overlap unless that takes more of them."""
    policy: Annotated[
        str,
        "Which waiting request is scheduled first: fcfs: the earliest; priority: the one with the "
        "lowest priority value; or a plugin, as PACKAGE:NAME.",
        Meta(extra={"name": "scheduling_policy", **plugged("schedulers", ("fcfs", "priority"))}),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        Size, "Limit on the tokens of one prompt in a step, so that short prompts overtake; 0: no limit."
    ] = 0
    reserve_full_prompt: Annotated[
        bool, "Admit a request only when its whole prompt fits into the KV cache, not just one step."
    ] = True
    """Without it two long prompts that are admitted together might only preempt each other."""
    rows_cache_bytes: Annotated[
        Count,
        "Bytes of the rows of images, as float32, that are computed soon or on their way from an encoder; the largest "
        "image must fit, and prompts wait for room.",
    ] = 1 << 30
    limit_mm_per_prompt: Annotated[
        MediaLimits | None,
        'Most images, sounds and videos of a prompt: a JSON object with image, audio and video, such as {"image": 4}; '
        "by default 999 of each.",
    ] = None
    log_events: Annotated[
        bool, "Log when requests are queued, scheduled and preempted.", Meta(extra={"name": "log_request_events"})
    ] = False
    watermark: Annotated[
        Annotated[float, Meta(ge=0, lt=1)],
        "Share of KV blocks that a new request leaves free while others run, for their next tokens.",
    ] = 0.01


class StructuredOutputConfig(Struct, frozen=True):
    """How outputs are made to follow a grammar."""

    backend: Annotated[
        str,
        "Library that makes outputs follow a grammar; auto: llguidance; or a plugin, as PACKAGE:NAME.",
        Meta(
            extra={
                "name": "structured_outputs_backend",
                **plugged("grammar_backends", ("auto", "llguidance", "xgrammar")),
            }
        ),
    ] = "auto"
    disable_any_whitespace: Annotated[
        bool, "Allow no blanks between the tokens of json and json_object, whatever a request asks for."
    ] = False
    tokenizer: str = ""
    """Path of the model's ``tokenizer.json``."""
    tokenizer_digest: bytes = b""
    """SHA-256 of that file, so that a process that loads it later can verify that it has not changed."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens of the checkpoint; empty: those that the tokenizer names."""
    plugins: tuple[str, ...] = ()
    """As in :class:`EngineConfig`."""


class ReasoningConfig(Struct, frozen=True):
    """How the reasoning that a model writes before its answer is found by its tokens."""

    parser: Annotated[
        str,
        "How the model writes reasoning; auto: as its chat template indicates; or a plugin, as PACKAGE:NAME.",
        Meta(extra={"name": "reasoning_parser", **plugged("reasoning_formats", PARSERS)}),
    ] = "auto"
    enable_in_reasoning: Annotated[
        bool, "Apply the constraints of structured outputs to the reasoning too, instead of only to the answer."
    ] = False
    marks: ReasoningMarks | None = None
    """The marks around the reasoning in the model's tokens; None: reasoning is not distinguished from the answer."""


class ObservabilityConfig(Struct, frozen=True):
    """What the step loop logs and records."""

    log_iterations: Annotated[
        bool, "Log a line for each step.", Meta(extra={"name": "enable_logging_iteration_details"})
    ] = False
    dump_dir: Annotated[str, "Directory for the scheduler's input of a step that failed; empty: it is only logged."] = (
        ""
    )
    dump_tokens: Annotated[bool, "Include the tokens of prompts and outputs in that dump."] = False
    trace_steps: bool = False
    """Whether the steps of traced requests are reported; the front sets it where spans have a receiver."""
    bill: bool = False
    """Whether CPU time is shared out to requests and tenants; the front sets it by ``--bill``."""


class EngineConfig(Struct, frozen=True):
    """The whole configuration, as INIT carries it to the core's process."""

    worker: WorkerConfig = WorkerConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv: KVConfig = KVConfig()
    parallel: ParallelConfig = ParallelConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    structured_output: StructuredOutputConfig | None = None
    """None: the model has no tokenizer, so outputs cannot be constrained."""
    reasoning: ReasoningConfig = ReasoningConfig()
    speculative: Annotated[
        SpeculativeConfig | None,
        "Draft tokens that one step verifies: a JSON object with method (ngram, suffix, draft_model, eagle, eagle3 "
        "or mtp), num_speculative_tokens and what the method needs (docs/use/speculation.md). No token changes.",
        Meta(extra={"name": "speculative_config"}),
    ] = None
    lora: LoraConfig = LoraConfig()
    plugins: tuple[str, ...] = ()
    """The packages whose plugins core and workers may load, as ``--plugins`` names them."""
    max_model_len: Annotated[
        Count | None,
        "Most tokens of prompt and output together; by default what the model supports and the KV cache can hold.",
    ] = None

    def check_plugins(self, plugins: Sequence[str]) -> None:
        """Raise ``ValueError``, naming the setting, for a plugin of a package that is not among ``plugins``."""
        check_named(
            plugins,
            scheduling_policy=self.scheduler.policy,
            reasoning_parser=self.reasoning.parser,
            device=self.worker.device,
            attention_backend=self.worker.attention_backend,
            load_format=self.worker.load_format,
            model_impl=self.worker.model_impl,
            distributed_executor_backend=self.parallel.distributed_executor_backend,
            structured_outputs_backend=self.structured_output.backend if self.structured_output else "auto",
        )
        self.kv.check_plugins(plugins)

    def check_core_place(self) -> None:
        """Raise ``ValueError``, naming the settings, for what a core in an actor of a Ray cluster does not do."""
        if self.parallel.data_parallel_backend == "ray" and self.kv.transports:
            raise ValueError(
                "data_parallel_backend: KV does not move to and from a core on Ray: leave out kv_transports, --prefill "
                "and --decode, or choose mp, and distributed_executor_backend ray, which puts the workers on Ray"
            )

    def check_cross(self) -> None:
        """Raise ``ValueError``, naming the settings, for what excludes rows that stand beside prompts."""
        settings = {
            f"role {self.kv.role}": self.kv.role != "both",
            "kv_transports": self.kv.transports,
            **self.kv.tiers,
            "decode_context_parallel_size above 1": self.parallel.decode_context_parallel_size > 1,
            "prefill_context_parallel_size above 1": self.parallel.prefill_context_parallel_size > 1,
            "speculative_config": self.speculative,
            "enable_lora": self.lora.enable,
            "language_model_only": self.worker.language_model_only,
        }
        if named := [name for name, value in settings.items() if value]:
            raise ValueError(f"this model writes down the sound beside each prompt; do not set {' or '.join(named)}")

    def check_encoder(self) -> None:
        """Raise ``ValueError``, naming the settings, for what an encoder does not have."""
        settings = {
            "kv_transports": self.kv.transports,
            **self.kv.tiers,
            "speculative_config": self.speculative,
            "state_memory_bytes": self.cache.state_memory_bytes,
            "state_prompts": self.worker.state_prompts != "auto",
        }
        if named := [name for name, value in settings.items() if value]:
            raise ValueError(f"an encoder keeps no KV and no states; do not set {' or '.join(named)}")

    def check_whole_prompts(self, length: int) -> None:
        """Raise ``ValueError`` if prompts are not cut, and one of the model's ``length`` tokens fits into no step."""
        wanted, scheduler = self.max_model_len or length, self.scheduler
        if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < wanted:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({scheduler.max_num_batched_tokens}) "
                f"must reach max_model_len ({wanted})"
            )

    def check_states(self, chunk: int) -> None:
        """Raise ``ValueError``, naming the settings, for what excludes layers that keep a state between tokens, and
        that compute prompts in chunks of so many tokens. 0: no layer does, which excludes memory for states."""
        if not chunk:
            named = {"state_memory_bytes": self.cache.state_memory_bytes is not None}
            named["state_prompts"] = self.worker.state_prompts != "auto"
            if name := next((name for name, is_set in named.items() if is_set), None):
                raise ValueError(f"{name}: no layer of this model keeps a state; leave it out")
        elif chunk > 1 and (lack := self.lack_for_chunks(chunk)):
            raise ValueError(lack)

    def lack_for_chunks(self, chunk: int) -> str:
        """Return why steps have no room for prompts in chunks of so many tokens; empty: they have."""
        scheduler = self.scheduler
        # Otherwise the first prompt of a step could have too few tokens for a whole chunk, step after step.
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs + chunk:
            return (
                f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}; layers of this model compute prompts "
                f"in chunks of {chunk} tokens, so it must be at least max_num_seqs {scheduler.max_num_seqs} + {chunk}"
            )
        if 0 < scheduler.long_prefill_token_threshold <= chunk:
            return (
                f"long_prefill_token_threshold is {scheduler.long_prefill_token_threshold}; layers of this model "
                f"compute prompts in chunks of {chunk} tokens, so it must be above {chunk}, or 0 for no limit"
            )
        return ""
