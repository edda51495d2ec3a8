"""What an engine holds in memory against what it must: packed weights, the KV pool, and an allowance for the rest."""

from pathlib import Path
from typing import Any

import psutil

from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig

from .checkpoint_bytes import embedding_bytes, tensor_bytes

ALLOWANCE = 600_000_000
"""Bytes for the interpreter, torch and what steps compute in."""


def packed_weight_bytes(model: Path, config: ModelConfig) -> int:
    """Bytes of all weights once they are loaded: a tied embedding is also packed as the output layer."""
    total = sum(tensor_bytes(model, config).values())
    return total + embedding_bytes(config) if config.tie_word_embeddings else total


def measure_memory(model: Path, config: ModelConfig, num_kv_tokens: int) -> dict[str, Any]:
    """Of this process, in which the engine runs; in bytes. ``num_kv_tokens``: that the KV pool has room for."""
    rss = psutil.Process().memory_info().rss
    weights, pool = packed_weight_bytes(model, config), num_kv_tokens * config.kv_bytes_per_token
    return {
        "rss_bytes": rss,
        "packed_weight_bytes": weights,
        "kv_pool_bytes": pool,
        "allowance_bytes": ALLOWANCE,
        "share_of_bound": round(rss / (weights + pool + ALLOWANCE), 4),
    }
