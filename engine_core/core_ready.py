"""What a core says of itself when its model is loaded and its KV cache is there, and what it compares with other ranks.

The configuration of an encoder is adapted before: it computes whole prompts and keeps no KV.
"""

import hashlib
import json
from math import lcm

from msgspec.structs import replace

from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.process.plugins import marks

from .data.config import EngineConfig
from .data.handshake import CoreReady, WarmUp
from .data.kv_groups import KVCacheConfig, common_layout
from .data.model_info import ModelInfo
from .scheduling.adapters import Adapters


def core_ready(
    config: EngineConfig,
    model: ModelInfo,
    kv_cache: KVCacheConfig,
    warm_up: WarmUp,
    adapters: Adapters | None,
    *,
    has_waves: bool,
) -> CoreReady:
    """Return the message of a core that can compute; ``has_waves`` as in :attr:`EngineCore.has_waves`."""
    return CoreReady(
        num_kv_blocks=kv_cache.num_blocks,
        num_kv_groups=max(1, len(kv_cache.groups)),
        max_model_len=kv_cache.max_model_len,
        vocab_size=model.vocab_size,
        block_size=config.cache.block_size,
        kv_layout=config.kv.layout_of(common_layout(model.kv_layout)),
        numerics="/".join((model.numerics, *marks(config.plugins, "numerics"))),
        hidden_size=model.hidden_size,
        num_state_slots=kv_cache.num_state_slots,
        state_boundary=lcm(config.cache.block_size, kv_cache.state_chunk) if kv_cache.num_state_slots else 0,
        experts_per_token=model.experts_per_token,
        warm_up=warm_up,
        finds_reasoning=config.reasoning.marks is not None,
        loras=adapters.answer().adapters if adapters is not None else [],
        pooling=model.pooling,
        pool_is_on_host=model.pool_is_on_host,
        media=model.media,
        has_waves=has_waves,
        num_threads=model.num_threads,
        argument_schemas=model.argument_schemas,
        fall_backs=list(dict.fromkeys((*model.fall_backs, *OF_PROCESS.own()))),
    )


def parallel_facts(config: EngineConfig, ready: CoreReady) -> dict[str, str]:
    """Return the settings and properties that the ranks of a group compare, by name."""
    named = {
        "model's numerics": ready.numerics,
        "kv_layout": ready.kv_layout,
        "block_size": ready.block_size,
        "vocab_size": ready.vocab_size,
        "max_model_len": ready.max_model_len,
        "speculative_config": config.speculative,
        "enable_lora": config.lora.enable,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "decode_context_parallel_size": config.parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": config.parallel.prefill_context_parallel_size,
        "enable_expert_parallel": config.parallel.enable_expert_parallel,
        "enable_eplb": config.parallel.enable_eplb,
        "eplb_config": config.parallel.eplb_config,
    }
    return {name: str(value) for name, value in named.items()}


def parallel_config_hash(facts: dict[str, str]) -> bytes:
    """Return a digest of the facts, which the coordinator compares."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()[:8]


def check_states(config: EngineConfig, model: ModelInfo) -> None:
    """Raise ``ValueError``, naming the setting, for what an engine cannot do with a model whose layers keep a state."""
    config.check_states(model.state_chunk if model.state_bytes else 0)
    if not model.state_bytes:
        return
    if config.kv.transports and not model.pool_is_on_host:
        raise ValueError(
            "layers of this model keep a state between tokens, which only moves between engines whose KV pool is in "
            "host memory; do not set kv_transports"
        )
    if model.kv_groups:
        raise ValueError(
            "layers of this model keep a state between tokens, and others attend to a window; set "
            "disable_hybrid_kv_cache_manager"
        )


_STEPS = 2
"""Steps in flight, whose requests hold blocks at the same time."""


def encoder_config(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """Return the configuration for an encoder with this context length, in tokens.

    No prompt is longer than a step. Blocks hold no bytes, and are so many that no request ever waits for one. Raises
    ``ValueError`` naming a setting that is not possible.
    """
    config.check_encoder()
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
