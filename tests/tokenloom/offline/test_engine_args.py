import inspect

import pytest
import torch

from tokenloom import LLM
from tokenloom.offline.engine_args import DEFAULTS, engine_config
from tokenloom.services.runtime.host.foreign_flags import is_foreign_argument
from tokenloom.services.runtime.host.options import options_of

_OFF = """
    allowed_local_media_path allowed_media_domains skip_tokenizer_init trust_remote_code revision tokenizer_revision
    code_revision hf_token hf_overrides hf_config_path chat_template seed cpu_offload_gb cpu_offload_params
    offload_params offload_group_size enforce_eager enable_return_routed_experts disable_custom_all_reduce
    mm_processor_kwargs pooler_config structured_outputs_config profiler_config attention_config
    kv_cache_memory_bytes compilation_config quantization quantization_config allow_deprecated_quantization
    logits_processors tokenizer served_model_name model_weights enable_prompt_embeds download_dir
    safetensors_load_strategy max_model_len cudagraph_capture_sizes max_cudagraph_capture_size
    distributed_executor_backend distributed_timeout_seconds data_parallel_rank data_parallel_size_local
    data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
    enable_expert_parallel enable_elastic_ep enable_dbo ubatch_size disable_nccl_for_dp_synchronization eplb_config
    enable_eplb max_parallel_loading_workers enable_prefix_caching disable_sliding_window disable_cascade_attn
    long_prefill_token_threshold max_num_batched_tokens max_num_seqs disable_log_stats aggregate_engine_logging
    limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_encoder_only
    mm_encoder_attn_backend io_processor_plugin skip_mm_profiling video_pruning_rate enable_lora default_mm_loras
    fully_sharded_loras max_cpu_loras enable_tower_connector_lora specialize_active_lora ray_workers_use_nsight
    num_gpu_blocks_override model_loader_extra_config enable_chunked_prefill disable_chunked_mm_input
    disable_hybrid_kv_cache_manager reasoning_parser_plugin speculative_config show_hidden_metrics_for_version
    otlp_traces_endpoint collect_detailed_traces kv_cache_metrics cudagraph_metrics enable_layerwise_nvtx_tracing
    enable_mfu_metrics enable_logging_iteration_details enable_mm_processor_stats scheduler_cls kernel_config
    kv_transfer_config kv_events_config ec_transfer_config enable_sleep_mode override_generation_config
    override_attention_dtype calculate_kv_scales mamba_block_size additional_config async_scheduling
    kv_sharing_fast_prefill kv_offloading_size tokens_only weight_transfer_config fail_on_environ_validation
    worker_extension_cls shutdown_timeout
"""
"""Arguments whose default is None, false or empty."""
# The fields of EngineArgs in vllm/engine/arg_utils.py and the parameters of LLM in vllm/entrypoints/llm.py, with their
# defaults.
OF_VLLM = {
    **dict.fromkeys(_OFF.split()),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1),
    **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
    **dict.fromkeys(("runner", "convert", "tokenizer_mode", "load_format", "config_format", "dtype"), "auto"),
    **dict.fromkeys(("kv_cache_dtype", "generation_config", "model_impl", "moe_backend", "worker_cls"), "auto"),
    **dict.fromkeys(("lora_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "offload_backend"), "auto"),
    **dict.fromkeys(("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"), 1),
    **dict.fromkeys(("offload_num_in_group", "offload_prefetch_step", "stream_interval", "nnodes", "max_loras"), 1),
    **dict.fromkeys(("max_num_partial_prefills", "max_long_partial_prefills"), 1),
    "block_size": 16,
    "max_lora_rank": 16,
    "max_logprobs": 20,
    "swap_space": 4,
    "optimization_level": 2,
    "gpu_memory_utilization": 0.92,
    "kv_cache_metrics_sample": 0.01,
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_encoder_tp_mode": "weights",
    "logprobs_mode": "raw_logprobs",
    "prefix_caching_hash_algo": "sha256",
    "scheduling_policy": "fcfs",
    "performance_mode": "balanced",
    "mamba_cache_mode": "none",
    "kv_offloading_backend": "native",
    "expert_placement_strategy": "linear",
    "all2all_backend": "allgather_reducescatter",
    "data_parallel_backend": "mp",
    "dcp_comm_backend": "ag_rs",
    "ignore_patterns": "original/**/*",
    "pt_load_map_location": "cpu",
    "use_tqdm_on_load": True,
    "enable_flashinfer_autotune": True,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
}
OWN = {*inspect.signature(LLM).parameters, *(name for each in options_of(DEFAULTS).values() for name in each.names)}


@pytest.mark.parametrize("name", OF_VLLM)
def test_every_argument_of_vllms_is_ours_or_answered(name):
    """With vLLM's default it changes nothing; another value is refused with what to use instead."""
    if name in inspect.signature(LLM).parameters or name == "disable_log_stats":  # of LLM, not of its engine
        return
    default = OF_VLLM[name]
    for value in (default, None, *(() if default else (False, {}, [], ""))):
        if name not in OWN or value in (default, None):
            assert engine_config({name: value})
    if name not in OWN:
        assert is_foreign_argument(name)
        if name not in ("trust_remote_code", "enable_sleep_mode", "disable_custom_all_reduce"):
            with pytest.raises(TypeError, match=rf"no keyword argument {name}, which vLLM has: \w"):
                engine_config({name: "other"})


def test_an_answer_names_arguments_where_ours_are_meant_and_flags_where_a_mesh_is():
    with pytest.raises(TypeError, match=r"offload_params, which vLLM has: use quantization$"):
        engine_config({"offload_params": ["x"]})
    with pytest.raises(
        TypeError, match=r"use --prefill and --decode, and --kv-transports, or --kv-store, with `tokenloom serve`$"
    ):
        engine_config({"kv_transfer_config": {"kv_role": "kv_both"}})
    with pytest.raises(TypeError, match="HF_TOKEN") as refused:
        engine_config({"hf_token": "secret"})
    assert "secret" not in str(refused.value)


def test_names_are_the_engines_or_vllms():
    made = engine_config({"kv_cache_memory_bytes": 5, "num_gpu_blocks_override": 7, "enable_prefix_caching": False})
    assert (made.cache.memory_bytes, made.cache.num_blocks, made.cache.enable_prefix_caching) == (5, 7, False)
    made = engine_config({"kv_cache_memory": 5, "num_kv_blocks": 7, "max_model_len": 9, "watermark": 0.5})
    assert (made.cache.memory_bytes, made.cache.num_blocks) == (5, 7)
    assert (made.max_model_len, made.scheduler.watermark) == (9, 0.5)


def test_none_stands_for_the_default():
    assert engine_config({"max_num_batched_tokens": None, "max_model_len": None}) == engine_config({})


@pytest.mark.parametrize(("seqs", "tokens", "expected"), [(None, 2048, 128), (None, 50, 50), (7, 50, 7)])
def test_the_default_batch_fits_the_token_budget(seqs, tokens, expected):
    made = engine_config({"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
    assert made.scheduler.max_num_seqs == expected


@pytest.mark.parametrize(
    ("seqs", "tokens", "expected"),
    [(None, None, (256, 8192)), (None, 50, (50, 50)), (7, None, (7, 8192)), (7, 50, (7, 50))],
)
def test_the_default_batch_is_larger_where_a_gpu_computes(seqs, tokens, expected):
    made = engine_config({"device": "cuda", "max_num_seqs": seqs, "max_num_batched_tokens": tokens})
    assert (made.scheduler.max_num_seqs, made.scheduler.max_num_batched_tokens) == expected


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), ("float", "float32"), ("auto", "auto")])
def test_dtypes(dtype, name):
    assert engine_config({"dtype": dtype}).worker.dtype == name


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "num_gpu_blocks_override"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_what_is_no_count_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: must be an integer ≥ 1, not {value!r}"):
        engine_config({name: value})


def test_similar_names_of_an_unknown_keyword_are_listed():
    with pytest.raises(TypeError, match="max_num_seq: no such option; did you mean max_num_seqs"):
        engine_config({"max_num_seq": 1})
