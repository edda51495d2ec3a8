"""What an engine can be told."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from tokenloom.engine_core.config import (
    CacheConfig,
    EngineConfig,
    KVConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    TLSFiles,
    WorkerConfig,
)
from tokenloom.gpu_worker.kv_connector import kv_transports
from tokenloom.services.runtime.host.service_settings import CommaList, ServiceSettings, check_address
from tokenloom.services.runtime.peers.tls import dns_name

from .control.role import RoleName
from .core.grammar_config import structured_output_config


class EngineSettings(ServiceSettings):
    """Names and meanings as in vLLM where vLLM has them."""

    service: ClassVar[str] = "engine"

    model: str = Field("tokenloom-demo", description="A checkpoint directory, a hub id, or the demo model's name.")
    served_model_name: str = Field("", description="Name clients use; by default the directory's last part.")
    coordinator: str = Field("", description="The coordinator's address; empty: serve without one.")
    advertise_address: str = Field("", description="Where peers reach this engine; by default where it listens.")

    worker: Literal["cpu", "hash", "timed"] = Field(
        "cpu",
        description="cpu: a model, on --device; for tests hash: tokens are hashes of the prefix; "
        "for benchmarks timed: a step only waits.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model computes; auto: on a GPU where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Compute type; auto: the checkpoint's.")
    quantization: Literal["int8-dynamic"] | None = Field(
        None, description="int8-dynamic: round the layers' weights to int8 at load, their inputs row by row."
    )
    attention_backend: Literal["auto", "cpu", "torch", "reference"] = Field(
        "auto", description="How attention is computed; auto: C++ kernels where they can be built, else torch."
    )
    num_threads: int = Field(0, ge=0, description="Compute threads; 0: the library's choice.")
    hash_step_seconds: float = Field(0.0, ge=0, description="How long a step of the hash or timed worker takes.")
    hash_token_seconds: float = Field(0.0, ge=0, description="How much longer for each token that it computes.")

    enable_prompt_embeds: bool = Field(False, description="Take embeddings in the place of prompt tokens.")
    profiler_dir: str = Field("", description="Where profiles are written; empty: profiling is refused.")

    compute_nans_in_logits: bool = Field(False, description="Count NaN logits: vllm:corrupted_requests.")
    enable_logging_iteration_details: bool = Field(False, description="Log a line for each step.")
    dump_dir: str = Field("", description="Directory for what was asked of a step that failed; empty: only the log.")
    dump_tokens: bool = Field(False, description="Let that name tokens of prompts and outputs.")

    max_model_len: int | None = Field(
        None, ge=1, description="Prompt and output together, tokens; by default the model's."
    )
    max_logprobs: int = Field(
        20, ge=-1, description="Alternatives that a request may ask for at each token; -1: the whole vocabulary."
    )
    max_num_seqs: int = Field(128, ge=1, description="Requests in a batch.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens in a step.")
    prefill_tokens_beside_decode: int | None = Field(
        128,
        ge=1,
        description="Prompt tokens in a step where others decode, for each request whose prompt waits; none: no limit.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="Who goes first: who came first, or requests of the lowest priority."
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Tokens of one prompt in a step, at most, so that short ones get past it; 0: no limit."
    )
    reserve_full_prompt: bool = Field(
        True, description="Admit a request only when its whole prompt fits into the KV cache, not just its first step."
    )
    watermark: float = Field(
        0.01, ge=0, lt=1, description="Share of KV blocks that a newcomer leaves free while others run."
    )
    distributed_executor_backend: Literal["uni", "mp"] = Field(
        "uni", description="Where the worker is: uni: in the core's process; mp: in a process of its own."
    )
    array_arena_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Shared memory through which large arrays (prompt embeddings, masks) get from process to process, "
        "as far as they need it; 0: they go over sockets.",
    )
    async_scheduling: bool = Field(
        False, description="Schedule the next step while one runs; no gain where the processor is what computes."
    )
    max_waiting: int = Field(2048, ge=1, description="Requests that may wait beyond those in the batch.")

    frame_interval: float = Field(
        0.008,
        ge=0,
        le=0.1,
        description="Seconds between frames to an output processor, but for first tokens and ends: quick steps "
        "share one; 0: a frame for each step.",
    )

    block_size: int = Field(16, ge=1, description="Tokens in a KV block.")
    num_kv_blocks: int | None = Field(None, ge=1, description="KV blocks; by default as many as memory allows.")
    kv_cache_memory: int | None = Field(None, ge=1, description="Bytes of the KV pool; by default from free memory.")
    engines_on_host: int = Field(1, ge=1, description="Engines that share this host's memory.")
    kv_events: bool = Field(False, description="Tell subscribers what the prefix cache gains and loses.")
    log_request_events: bool = Field(False, description="Log when requests are queued, scheduled and preempted.")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of equal prefixes.")

    structured_outputs_backend: Literal["auto", "llguidance", "xgrammar"] = Field(
        "auto", description="What makes outputs follow a grammar; auto: llguidance."
    )

    role: RoleName = Field("both", description="Which legs of requests it takes: prefill, decode or both.")
    kv_transports: CommaList = Field(
        (),
        description="How KV moves between engines, best first: auto, shm, nixl, socket; "
        "by default auto for prefill and decode, and not at all for both.",
    )
    kv_socket_listen: str = Field(
        "", description="Where the socket transport serves KV: host:port; by default for engines on this host only."
    )
    kv_socket_advertise: str = Field("", description="Host that engines connect to for that; by default the same.")
    kv_listen: str = Field("127.0.0.1:0", description="Where engines ask for KV: host:port or unix:/path; empty: off.")
    kv_advertise_address: str = Field("", description="Where engines reach that; by default where it listens.")
    kv_policy: Literal["recompute", "fail"] = Field(
        "recompute", description="When KV held elsewhere is lost: recompute it here, or fail the request."
    )
    kv_checksum: bool = Field(False, description="Compare a checksum of every KV block that moved.")
    kv_lease_seconds: float = Field(30.0, gt=0, description="How long KV is held for an engine that does not ask.")
    kv_load_timeout: float = Field(30.0, gt=0, description="Seconds without progress after which a load is given up.")
    kv_offload_path: str = Field("", description="Directory of a file for evicted KV blocks; empty: they are dropped.")
    kv_offload_bytes: int = Field(0, ge=0, description="How large that file may become.")
    failpoints: CommaList = Field((), description="Faults to inject, for tests: name=share, separated by commas.")

    @field_validator("coordinator", "advertise_address", "kv_listen", "kv_advertise_address")
    @classmethod
    def _check_peer_address(cls, value: str) -> str:
        return check_address(value) if value else value

    @field_validator("kv_transports")
    @classmethod
    def _check_transports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in ("auto", *kv_transports.NAMES):
                raise ValueError(f"a KV transport is one of auto, {', '.join(kv_transports.NAMES)}, not {name!r}")
        return value

    @property
    def transports(self) -> tuple[str, ...]:
        """Ways in which KV moves; empty: it does not."""
        return self.kv_transports or (() if self.role == "both" else ("auto",))

    def _socket_tls(self) -> TLSFiles | None:
        files = self.certificate
        if files is None:
            return None
        return TLSFiles(str(files.ca), str(files.cert), str(files.key), dns_name(self.service))

    def engine_config(self, checkpoint: str) -> EngineConfig:
        """The core's part of it, for the checkpoint in this directory."""
        return EngineConfig(
            worker=WorkerConfig(
                model=checkpoint,
                worker=self.worker,
                device=self.device,
                dtype=self.dtype,
                quantization=self.quantization,
                attention_backend=self.attention_backend,
                num_threads=self.num_threads,
                step_seconds=self.hash_step_seconds,
                token_seconds=self.hash_token_seconds,
                profiler_dir=self.profiler_dir,
                compute_nans_in_logits=self.compute_nans_in_logits,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
                kv_events=self.kv_events,
                num_blocks=self.num_kv_blocks,
                memory_bytes=self.kv_cache_memory,
                engines_on_host=self.engines_on_host,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                prefill_tokens_beside_decode=self.prefill_tokens_beside_decode,
                policy=self.scheduling_policy,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                reserve_full_prompt=self.reserve_full_prompt,
                watermark=self.watermark,
                log_events=self.log_request_events,
                async_scheduling=self.async_scheduling,
            ),
            kv=KVConfig(
                role=self.role,
                transports=self.transports,
                socket_listen=self.kv_socket_listen,
                socket_advertise=self.kv_socket_advertise,
                socket_tls=self._socket_tls(),
                policy=self.kv_policy,
                checksum=self.kv_checksum,
                lease_seconds=self.kv_lease_seconds,
                load_timeout_seconds=self.kv_load_timeout,
                offload_path=self.kv_offload_path,
                offload_bytes=self.kv_offload_bytes,
                failpoints=self.failpoints,
            ),
            structured_output=structured_output_config(Path(checkpoint), self.structured_outputs_backend)
            if checkpoint
            else None,
            parallel=ParallelConfig(
                distributed_executor_backend=self.distributed_executor_backend,
                array_arena_bytes=self.array_arena_bytes,
            ),
            observability=ObservabilityConfig(
                log_iterations=self.enable_logging_iteration_details,
                dump_dir=self.dump_dir,
                dump_tokens=self.dump_tokens,
            ),
            max_model_len=self.max_model_len,
        )
