"""What must be equal on all ranks of a data-parallel group."""

import hashlib
import json

from ..config import EngineConfig
from ..wire.handshake import CoreReady


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
