"""Adapts an engine's configuration to an encoder, which computes whole prompts and keeps no KV."""

from msgspec.structs import replace

from tokenloom.process.fall_backs import OF_PROCESS

from .data.config import EngineConfig

_STEPS = 2
"""Steps in flight, whose requests hold blocks at the same time."""


def encoder_config(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """Return the configuration for an encoder with this context length, in tokens.

    No prompt is longer than a step. Blocks hold no bytes, and are so many that no request ever waits for one. Raises
    ``ValueError`` naming a setting that is not possible.
    """
    if config.kv.transports or config.kv.offload_path or config.speculative is not None:
        raise ValueError("an encoder keeps no KV; do not set kv_transports, kv_offload_path or speculative_config")
    scheduler = config.scheduler
    if config.max_model_len is not None and config.max_model_len > scheduler.max_num_batched_tokens:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but an encoder computes a prompt in one step, of at most "
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens}"
        )
    longest = config.max_model_len or min(max_model_len, scheduler.max_num_batched_tokens)
    if longest < max_model_len and config.max_model_len is None:
        OF_PROCESS.begin(
            "short_prompts",
            f"{longest} of {max_model_len} tokens, because an encoder computes a prompt in one step; raise "
            "max_num_batched_tokens for longer ones",
        )
    num_blocks = scheduler.max_num_batched_tokens // config.cache.block_size + scheduler.max_num_seqs
    return replace(
        config,
        max_model_len=longest,
        cache=replace(config.cache, enable_prefix_caching=False, num_blocks=_STEPS * num_blocks),
        scheduler=replace(scheduler, enable_chunked_prefill=False, long_prefill_token_threshold=0, watermark=0.0),
    )
