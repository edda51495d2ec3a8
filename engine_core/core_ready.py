"""What a core says of itself when its model is loaded and its KV cache is there."""

import hashlib
import json

from tokenloom.process.fall_backs import OF_PROCESS

from .data.config import EngineConfig
from .data.handshake import CoreReady, WarmUp
from .data.kv_cache_config import KVCacheConfig
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
        kv_layout=model.kv_layout,
        numerics=model.numerics,
        hidden_size=model.hidden_size,
        experts_per_token=model.experts_per_token,
        warm_up=warm_up,
        finds_reasoning=config.reasoning.marks is not None,
        loras=adapters.answer().adapters if adapters is not None else [],
        pooling=model.pooling,
        pool_is_on_host=model.pool_is_on_host,
        has_waves=has_waves,
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
        "enable_expert_parallel": config.parallel.enable_expert_parallel,
        "enable_eplb": config.parallel.enable_eplb,
        "eplb_config": config.parallel.eplb_config,
    }
    return {name: str(value) for name, value in named.items()}


def parallel_config_hash(facts: dict[str, str]) -> bytes:
    """Return a digest of the facts, which the coordinator compares."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()[:8]
