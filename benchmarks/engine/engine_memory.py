"""Compares an engine's memory with what it needs: packed weights, the KV pool, and an allowance for the rest."""

from pathlib import Path
from typing import Any

import psutil

from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig

from .checkpoint_bytes import embedding_bytes, tensor_bytes

ALLOWANCE = 600_000_000
"""Bytes for the interpreter, torch and the buffers of a step."""


def packed_weight_bytes(model: Path, config: ModelConfig) -> int:
    """Return the bytes of all loaded weights. A tied embedding is also packed as the output layer."""
    total = sum(tensor_bytes(model, config).values())
    return total + embedding_bytes(config) if config.tie_word_embeddings else total


def measure_memory(model: Path, config: ModelConfig, num_kv_tokens: int) -> dict[str, Any]:
    """Measure this process, in which the engine runs, in bytes. ``num_kv_tokens`` is the capacity of the KV pool."""
    rss = psutil.Process().memory_info().rss
    weights, pool = packed_weight_bytes(model, config), num_kv_tokens * config.kv_bytes_per_token
    return {
        "rss_bytes": rss,
        "packed_weight_bytes": weights,
        "kv_pool_bytes": pool,
        "allowance_bytes": ALLOWANCE,
        "share_of_bound": round(rss / (weights + pool + ALLOWANCE), 4),
    }
