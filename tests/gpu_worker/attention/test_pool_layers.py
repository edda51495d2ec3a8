from typing import Any

import torch

from tokenloom.engine_core.data.kv_groups import KVGroup
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.grouped_backend import GroupedBackend
from tokenloom.gpu_worker.attention.pool_layers import PoolLayers
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig

GROUPS = [KVGroup(None, [1, 4]), KVGroup(9, [0, 2]), KVGroup(9, [3])]


def make_config(**entries: Any) -> ModelConfig:
    return ModelConfig(
        family="llama", dtype=torch.float32, vocab_size=9, hidden_size=32, intermediate_size=9, num_layers=5,
        num_heads=2, num_kv_heads=2, head_size=16, max_model_len=99, norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=False, attention_scales=(1.0,) * 5, sliding_windows=(9, None, 9, 9, None), **entries,
    )  # fmt: skip


def test_without_groups_each_layer_has_a_tensor() -> None:
    config = make_config()
    layers = PoolLayers(config, [])
    assert (layers.config, layers.num_groups, layers.layout(16)) == (config, 1, "HND/fp32/5x2x16/16")
    assert layers.kv_bytes_per_token == config.kv_bytes_per_token == 5 * 256
    assert [layers.written_bytes_per_token(count) for count in (3, 8, None)] == [3 * 256, 5 * 256, 5 * 256]
    assert not isinstance(layers.make_backend(_make, 16), GroupedBackend)


def test_groups_share_tensors() -> None:
    layers = PoolLayers(make_config(), GROUPS)
    assert (layers.config.num_layers, layers.num_groups) == (2, 3)
    assert layers.layout(16) == "HND/fp32/5x2x16/16/full,9,9"
    assert layers.kv_bytes_per_token == 5 * 256
    assert [layers.written_bytes_per_token(count) for count in (1, 2, 3, None)] == [256, 256, 2 * 256, 2 * 256]
    backend = layers.make_backend(_make, 16)
    assert isinstance(backend, GroupedBackend)
    assert [cache.shape[1] for cache in backend.allocate(7)] == [7] * 5


def test_a_layer_without_keys_of_its_own_uses_those_of_its_source() -> None:
    groups = [KVGroup(None, [1]), KVGroup(9, [0])]
    layers = PoolLayers(make_config(kv_sources=(0, 1, 0, 0, 1)), groups)
    assert layers.kv_bytes_per_token == 2 * 256
    caches = layers.make_backend(_make, 16).allocate(3)
    assert caches[2] is caches[3] is caches[0]
    assert caches[4] is caches[1] is not caches[0]


def _make(config: ModelConfig) -> Any:
    return make_attention_backend("torch", config, 16, torch.device("cpu"))
