"""Answers flags of ``vllm serve``, and arguments of vLLM's ``LLM``, that Tokenloom does not have: what to use instead,
or what holds without it. An argument has the name of its flag.

A flag that both have under one name (``--max-num-seqs``) is an option of ours and stands in no table here.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

from .options import did_you_mean

_MACHINES = "see docs/use/two-machines.md and docs/operate/kubernetes.md"
_OFFLOAD = "use --kv-offload-path and --kv-offload-bytes"
_ENVIRONMENT = "set the environment variable "
_HUB = "write the revision after the name of the model: org/name@REVISION"
_DEFAULTS = "edit generation_config.json of the checkpoint"
_CONFIG = "edit config.json of the checkpoint"
_IMAGES = "images, videos and sounds are prepared as the checkpoint's files say"
_LOG = "prompts and outputs are never logged"
_METRICS = "see GET /metrics, which has the statistics"
_WEIGHTS = "use --quantization"
_DECIDED = "there is no such choice: the engine decides by the device and the model"
_PLUGINS = "see docs/use/plugins.md"

ANSWERS = {
    # The edge.
    "--uds": "run `python -m tokenloom.services.gateway --http-listen unix:/PATH`",
    "--api-server-count -asc": "use --gateways",
    "--grpc": "gRPC is always served, on --grpc-port",
    "--allowed-origins": "use --cors-origins",
    "--ssl-keyfile": "use --public-tls-key",
    "--ssl-certfile": "use --public-tls-cert",
    "--ssl-ca-certs": "use --api-key-file",
    "--enable-request-id-headers": "every response carries x-request-id",
    "--enable-server-load-tracking": "see GET /load, which is always served",
    "--shutdown-timeout": "use --drain-timeout",
    "--enable-sleep-mode": "use --admin-api-key, and POST /sleep",
    "--weight-transfer-config": "call EngineAdmin.StageWeights",
    "--renderer-num-workers": "use --render-workers",
    # Logs, metrics, traces.
    "--uvicorn-log-level": "use --log-level",
    "--log-config-file": "use --log-level and --log-format",
    "--enable-log-requests": "the gateway logs each request that has ended",
    "--disable-log-requests": "use --no-access-log",
    "--disable-uvicorn-access-log": "use --no-access-log",
    "--disable-access-log-for-endpoints": "use --no-access-log",
    "--enable-log-outputs": _LOG,
    "--enable-log-deltas": _LOG,
    "--max-log-len": _LOG,
    "--aggregate-engine-logging": _METRICS,
    "--kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics --enable-mfu-metrics": _METRICS,
    "--show-hidden-metrics-for-version": _METRICS,
    "--enable-layerwise-nvtx-tracing": "use --profiler-dir",
    "--otlp-traces-endpoint": "use --otlp-endpoint",
    "--collect-detailed-traces": "use --otlp-endpoint",
    "--profiler-config": "use --profiler-dir",
    # Requests.
    "--chat-template-content-format": "the tokenizer finds out which form the chat template reads",
    "--default-chat-template-kwargs": "send chat_template_kwargs in the request",
    "--return-tokens-as-token-ids": "send return_tokens_as_token_ids in the request",
    "--enable-force-include-usage": "send stream_options.include_usage in the request",
    "--enable-prompt-tokens-details": "usage always holds the number of cached prompt tokens",
    "--enable-return-routed-experts": "send return_routed_experts in the request",
    "--logits-processors": "use --plugins",
    "--seed": "send seed in the request",
    "--logprobs-mode": "log probabilities are the model's own, before penalties and temperature (raw_logprobs)",
    "--response-role": "answers always have the role assistant",
    "--enable-auto-tool-choice": "use --tool-call-parser",
    "--tool-parser-plugin": "use --plugins and --tool-call-parser",
    "--reasoning-parser-plugin": "use --plugins and --reasoning-parser",
    "--mm-processor-kwargs": "send mm_processor_kwargs in the request",
    "--media-io-kwargs": _IMAGES,
    "--allowed-local-media-path": "use --allowed-media-domains",
    "--mm-encoder-only --ec-transfer-config": "use --encoders",
    "--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb": "use --media-rows-bytes, "
    "--media-files-bytes and --rows-cache-bytes",
    "--mm-encoder-tp-mode --mm-encoder-attn-backend --skip-mm-profiling --disable-chunked-mm-input": _DECIDED,
    "--enable-mm-embeds --interleave-mm-strings --video-pruning-rate --enable-mm-processor-stats": _IMAGES,
    "--default-mm-loras --enable-tower-connector-lora": _IMAGES,
    # The model and its files.
    "--task": "use --runner",
    "--convert": "use --runner",
    "--revision": _HUB,
    "--code-revision": _HUB,
    "--tokenizer-revision": _HUB,
    "--hf-token": f"{_ENVIRONMENT}HF_TOKEN",
    "--download-dir": f"{_ENVIRONMENT}HF_HUB_CACHE",
    "--hf-overrides": _CONFIG,
    "--rope-scaling": _CONFIG,
    "--rope-theta": _CONFIG,
    "--generation-config": _DEFAULTS,
    "--override-generation-config": _DEFAULTS,
    "--trust-remote-code": "code of a checkpoint is never run",
    "--tokenizer-mode": "the fast tokenizer of the checkpoint is used; one that has no tokenizer.json is converted",
    "--skip-tokenizer-init --tokens-only": "the tokenizer is always loaded; send token ids, and detokenize false",
    "--config-format --hf-config-path --model-weights": "a model is one directory, with config.json and its weights",
    "--safetensors-load-strategy --pt-load-map-location --max-parallel-loading-workers": "files are mapped into memory",
    "--model-loader-extra-config --ignore-patterns --use-tqdm-on-load": "use --load-format",
    "--override-attention-dtype": "use --dtype",
    "--cpu-offload-params": "use --cpu-offload-gb",
    "--offload-backend --offload-group-size --offload-num-in-group --offload-prefetch-step --offload-params": _WEIGHTS,
    "--quantization-config --allow-deprecated-quantization": _WEIGHTS,
    "--fully-sharded-loras --lora-dtype --specialize-active-lora": "use --enable-lora, --max-loras and --max-lora-rank",
    "--kernel-config --moe-backend --enable-flashinfer-autotune": _DECIDED,
    "--disable-custom-all-reduce --disable-nccl-for-dp-synchronization --ray-workers-use-nsight": _DECIDED,
    "--enable-dbo --ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold": _DECIDED,
    "--kv-sharing-fast-prefill --performance-mode --max-cudagraph-capture-size": _DECIDED,
    "--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode": _DECIDED,
    "--io-processor-plugin --worker-cls --worker-extension-cls --additional-config": _PLUGINS,
    "--disable-sliding-window": "use --max-model-len",
    "--attention-config": "use --attention-backend",
    "--compilation-config -cc -O --optimization-level": "use --enforce-eager",
    "--cudagraph-capture-sizes": "use --max-num-seqs",
    # KV cache and scheduling.
    "--swap-space": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--kv-transfer-config": "use --prefill and --decode, and --kv-transports, or --kv-store",
    "--calculate-kv-scales": "use --kv-cache-dtype",
    "--prefix-caching-hash-algo": "blocks are always named by SHA-256",
    "--max-num-partial-prefills": "use --prefill-tokens-beside-decode",
    "--max-long-partial-prefills": "use --long-prefill-token-threshold",
    "--scheduler-reserve-full-isl": "use --reserve-full-prompt",
    "--scheduler-cls": "use --plugins and --scheduling-policy",
    "--num-scheduler-steps": "use --async-scheduling",
    "--stream-interval": "use --frame-interval",
    "--guided-decoding-backend": "use --structured-outputs-backend",
    "--guided-decoding-disable-any-whitespace": "use --disable-any-whitespace",
    "--structured-outputs-config": "use --structured-outputs-backend, --disable-any-whitespace and "
    "--enable-in-reasoning",
    "--speculative-model": "use --speculative-config",
    "--num-speculative-tokens": "use --speculative-config",
    # Several workers, engines and machines.
    "-tp": "use --tensor-parallel-size",
    "-pp": "use --pipeline-parallel-size",
    "-dcp": "use --decode-context-parallel-size",
    "-pcp": "use --prefill-context-parallel-size",
    "--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size": "use "
    "--decode-context-parallel-size",
    "-ep": "use --enable-expert-parallel",
    "--all2all-backend --enable-elastic-ep": "use --enable-expert-parallel",
    "--expert-placement-strategy": "use --enable-eplb",
    "-dp": "use --data-parallel-size",
    "-dpl": "use --data-parallel-size-local",
    "-dpr --data-parallel-rank": "use --data-parallel-start-rank",
    "-dph": "use --data-parallel-hybrid-lb",
    "-dpe": "use --data-parallel-external-lb",
    "-dpa": "use --data-parallel-address",
    "--numa-bind": "use --cpus",
    "-dpb": "use --data-parallel-backend",
    "--data-parallel-rpc-port -dpp": _MACHINES,
    "--headless": _MACHINES,
    "--nnodes -n": _MACHINES,
    "--node-rank -r": _MACHINES,
    "--master-addr": _MACHINES,
    "--master-port --distributed-timeout-seconds --fail-on-environ-validation": _MACHINES,
}

DEFAULTS: Mapping[str, tuple[object, ...]] = {
    # Permissions and switches that ask for nothing here.
    "trust_remote_code": (True,),
    "enable_sleep_mode": (True,),
    "disable_custom_all_reduce": (True,),
    "use_tqdm_on_load": (True,),
    "enable_flashinfer_autotune": (True,),
    # vLLM's own defaults.
    "tokenizer_mode": ("auto", "hf", "slow"),  # a fast tokenizer gives the tokens of the slow one
    "task": ("auto",),
    "convert": ("auto",),
    "config_format": ("auto",),
    "generation_config": ("auto",),
    "logprobs_mode": ("raw_logprobs",),
    "safetensors_load_strategy": ("lazy",),
    "pt_load_map_location": ("cpu",),
    "ignore_patterns": ("original/**/*", ["original/**/*"]),
    "lora_dtype": ("auto",),
    "swap_space": (4,),
    "offload_backend": ("auto",),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "kv_offloading_backend": ("native",),
    "prefix_caching_hash_algo": ("sha256",),
    "kv_cache_metrics_sample": (0.01,),
    "max_num_partial_prefills": (1,),
    "max_long_partial_prefills": (1,),
    "scheduler_reserve_full_isl": (True,),
    "stream_interval": (1,),
    "optimization_level": (2,),
    "performance_mode": ("balanced",),
    "moe_backend": ("auto",),
    "worker_cls": ("auto",),
    "mm_processor_cache_gb": (4,),
    "mm_processor_cache_type": ("lru",),
    "mm_shm_cache_max_object_size_mb": (128,),
    "mm_encoder_tp_mode": ("weights",),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "mamba_cache_mode": ("none",),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "dcp_comm_backend": ("ag_rs",),
    "dcp_kv_cache_interleave_size": (1,),
    "cp_kv_cache_interleave_size": (1,),
    "all2all_backend": ("allgather_reducescatter",),
    "expert_placement_strategy": ("linear",),
    "nnodes": (1,),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
}
"""Values of vLLM's arguments that change nothing here; None, and what is empty, 0 or False, changes nothing either."""


_SERVED_ARGUMENTS = dict.fromkeys(
    ("data_parallel_size_local", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
    "LLM runs one engine; serve a group with `tokenloom serve`",
) | {
    "allowed_media_domains": "LLM fetches no URLs; pass pictures, paths or data: URLs",
    "kv_events_config": "LLM publishes no KV events; serve the model with `tokenloom serve`",
}
"""Arguments whose flags ``tokenloom serve`` has."""

_OWN = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_COMMAND = re.compile(r"`[^`]*`")
"""A command in an answer, whose flags are not options of ``tokenloom serve``."""


@dataclass(frozen=True)
class ForeignFlag:
    """Describes one flag of ``vllm serve``."""

    names: tuple[str, ...]
    """The flag as users write it, then its short forms: ``("--tensor-parallel-size", "-tp")``."""
    answer: str
    """A clause that names what to use or the reason; it continues a sentence."""

    @property
    def own(self) -> tuple[str, ...]:
        """The options of ``tokenloom serve`` that the answer names, without ``--no-``."""
        named = _OWN.findall(_COMMAND.sub("", self.answer))
        return tuple(dict.fromkeys(name.replace("--no-", "--") for name in named))

    def sentence(self, name: str, offered: Collection[str]) -> str:
        """Return the answer to a user who wrote ``name`` for a command that offers these flags."""
        of_serve = "" if set(self.own) <= set(offered) else ", with `tokenloom serve`"
        return f"{name} is a flag of vLLM: {self.answer}{of_serve}"


@cache
def foreign_flags() -> tuple[ForeignFlag, ...]:
    """Return the flags of vLLM that are answered, in the order of the table."""
    return tuple(ForeignFlag(tuple(names.split()), answer) for names, answer in ANSWERS.items())


def answer_unknown(written: str, own: Collection[str]) -> str:
    """Return one sentence about a flag that a command does not have.

    Args:
        written: The argument as the user wrote it, perhaps with ``=value``.
        own: The flags of the command.
    """
    name = written.partition("=")[0]
    known = _by_name()
    for spelling in (name, name.replace("_", "-"), "--" + name.removeprefix("--no-").replace("_", "-")):
        if spelling in known:
            return known[spelling].sentence(name, own)
    return f"{name}: no such option{did_you_mean(name, own)}"


def answer_argument(name: str, value: object, own: Collection[str]) -> str | None:
    """Return one sentence about an argument of vLLM's ``LLM`` that ours does not have; None if this value of it changes
    nothing.

    Args:
        own: The arguments of ours.
    """
    if not value or value in DEFAULTS.get(name, ()):
        return None
    if (answer := _SERVED_ARGUMENTS.get(name, "")) == "":
        flag = _by_name()["--" + name.replace("_", "-")]
        answer = _OWN.sub(lambda match: _argument(match[0]), flag.answer)
        if not set(map(_argument, flag.own)) <= set(own):
            answer = f"{flag.answer}, with `tokenloom serve`"
    # Without the value, which may be a secret.
    return f"{name}, which vLLM has: {answer}"


def is_foreign_argument(name: str) -> bool:
    """Return whether vLLM's ``LLM`` has an argument that is answered here."""
    return name in _SERVED_ARGUMENTS or "--" + name.replace("_", "-") in _by_name()


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@cache
def _by_name() -> dict[str, ForeignFlag]:
    return {name: each for each in foreign_flags() for name in each.names}
