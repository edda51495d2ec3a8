"""Lists what of vLLM has the same name here, and which of its metrics have another one."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SAME_FLAGS = _names(
    """
    --api-key --async-scheduling --attention-backend --block-size --config --disable-hybrid-kv-cache-manager
    --distributed-executor-backend --dtype --enable-chunked-prefill --enable-eplb --enable-logging-iteration-details
    --enable-lora --enable-prefix-caching --enable-prompt-embeds --eplb-config --host --kv-cache-dtype
    --kv-cache-memory-bytes --long-prefill-token-threshold --lora-modules --max-cpu-loras --max-logprobs
    --max-lora-rank --max-loras --max-model-len --max-num-batched-tokens --max-num-seqs --model-impl
    --num-gpu-blocks-override --port --quantization --reasoning-parser --scheduling-policy --served-model-name
    --speculative-config --tool-call-parser
    """
)
"""Options of ``tokenloom serve`` that ``vllm serve`` has under the same name and with the same meaning."""

SAME_ARGUMENTS = _names(
    """
    model tokenizer tensor_parallel_size dtype quantization seed gpu_memory_utilization kv_cache_memory_bytes
    enforce_eager runner pooler_config
    """
)
"""Those arguments that vLLM's ``LLM`` documents and ours has too."""

MISSING_ARGUMENTS = _names(
    """
    tokenizer_mode skip_tokenizer_init trust_remote_code revision tokenizer_revision swap_space cpu_offload_gb hf_token
    hf_overrides compilation_config
    """
)
"""Some of the others."""

SAME_METRICS = _names(
    """
    cache_config_info corrupted_requests_total e2e_request_latency_seconds external_prefix_cache_hits_total
    external_prefix_cache_queries_total generation_tokens_total inter_token_latency_seconds iteration_tokens_total
    kv_cache_usage_perc num_preemptions_total num_requests_running num_requests_waiting prefix_cache_hits_total
    prefix_cache_queries_total prompt_tokens_by_source_total prompt_tokens_total lora_requests_info
    request_decode_time_seconds request_generation_tokens request_inference_time_seconds
    request_max_num_generation_tokens request_params_max_tokens request_params_n request_prefill_kv_computed_tokens
    request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds request_success_total
    request_time_per_output_token_seconds spec_decode_num_accepted_tokens_per_pos_total
    spec_decode_num_accepted_tokens_total spec_decode_num_draft_tokens_total spec_decode_num_drafts_total
    time_to_first_token_seconds
    """
)
"""Metrics that mean the same and have the same name, without vLLM's prefix."""

OTHER_METRICS = {
    "engine_sleep_state": "`GET /is_sleeping` at the gateway, with an admin key",
    "estimated_flops_per_gpu_total": "not available; `tokenloom bench step` compares a step with the machine",
    "mm_cache_hits_total": "not available: models read text only",
    "mm_cache_queries_total": "not available: models read text only",
    "nixl_num_failed_transfers_total": "`tokenloom_kv_recompute_total` counts failed transfers by reason",
    "nixl_xfer_time_seconds": "`tokenloom_kv_transfer_bytes_total` by transport; the time is in a request's timeline",
    "time_per_output_token_seconds": "`vllm:inter_token_latency_seconds`, as in vLLM itself since it dropped the name",
}
"""Metrics without a namesake, and what to use instead."""
