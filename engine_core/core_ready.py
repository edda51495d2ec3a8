"""What a core says of itself when its model is loaded and its KV cache is there."""

from tokenloom.process.fall_backs import OF_PROCESS

from .adapters import Adapters
from .config import EngineConfig
from .kv_cache.kv_cache_config import KVCacheConfig
from .wire.handshake import CoreReady, WarmUp
from .worker import ModelInfo


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
