"""Layers of several groups share tensors, and each finds its own blocks; released blocks change nothing."""

import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, CPU, Step, make_step, shape
from tokenloom.engine_core.data.kv_groups import KVGroup
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.grouped_backend import GroupedBackend, PoolLayers
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig

BACKENDS = ["torch", "reference", *(["cpu"] if shutil.which("g++") else [])]
WINDOWS = (None, 40, 7)
GROUPS = [KVGroup(None, [1]), KVGroup(40, [0]), KVGroup(7, [2])]


@dataclass
class Grouped:
    """The same step for one layer of each group, in one pool whose other blocks hold NaN."""

    arrays: dict[str, Any]
    cache: Tensor
    """[2, blocks, heads, block size, head size]"""


def grouped(step: Step) -> Grouped:
    tables, slots = step.arrays["block_tables"], step.arrays["slot_mapping"]
    num_blocks = step.cache.shape[1]
    cache = torch.full((2, 1 + 4 * num_blocks, *step.cache.shape[2:]), float("nan"))
    flat = np.zeros((len(tables), tables.shape[1] * len(GROUPS)), dtype=np.int32)
    starts = step.arrays["seq_lens"] - np.diff(step.arrays["cu_query_lens"])
    for index, group in enumerate(GROUPS):
        offset = 1 + index * num_blocks
        cache[:, offset : offset + num_blocks] = step.cache
        flat[:, index :: len(GROUPS)] = tables + offset
        for row, start in enumerate(starts):
            unseen = max(0, start - (group.window or 1 << 30) + 1) // BLOCK_SIZE
            flat[row, index : unseen * len(GROUPS) : len(GROUPS)] = 1 + 3 * num_blocks  # released: another's by now
    shifts = (1 + np.arange(len(GROUPS)) * num_blocks)[:, None] * BLOCK_SIZE
    return Grouped(step.arrays | {"block_tables": flat, "slot_mapping": slots + shifts}, cache)


def make_backend(name: str, config: Any) -> GroupedBackend:
    return GroupedBackend(GROUPS, BLOCK_SIZE, lambda: make_attention_backend(name, config, BLOCK_SIZE, CPU))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", BACKENDS)
def test_each_layer_reads_the_blocks_of_its_group(name: str, batch: str) -> None:
    config = shape(2)
    step = make_step(*BATCHES[batch], 4, config)
    plain, backend = make_attention_backend(name, config, BLOCK_SIZE, CPU), make_backend(name, config)
    inputs = grouped(step)
    caches = backend.allocate(inputs.cache.shape[1])
    assert len({cache.data_ptr() for cache in caches}) == 1, "one tensor for the first layer of every group"
    caches[0].copy_(inputs.cache)
    plan = backend.plan(**inputs.arrays)
    for layer, window in ((0, 40), (1, None), (2, 7)):
        rule = ScoreRule(step.query.shape[2] ** -0.5, window)
        alone, expected_plan = step.cache.clone(), plain.plan(**step.arrays)
        expected_plan.write_kv(step.key, step.value, alone)
        plan.write_kv(step.key, step.value, caches[layer])
        found = plan.attend(step.query, caches[layer], rule)
        assert torch.equal(found, expected_plan.attend(step.query, alone, rule))
        (slots,) = [inputs.arrays["slot_mapping"][i] for i, group in enumerate(GROUPS) if layer in group.layers]
        assert plan.slots_of(caches[layer]).tolist() == slots.tolist()


def test_windows_share_no_prefix() -> None:
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    backend = make_backend("cpu", shape(2))
    fewest = [part.prefixes.fewest_members for part in backend.parts if isinstance(part, CPUBackend)]
    assert fewest[0] < 100 < min(fewest[1:])


def test_unequal_groups_leave_a_tensor_unused() -> None:
    groups = [KVGroup(None, [2]), KVGroup(9, [0, 1])]
    config = shape(2)
    config.num_layers = 2
    config.kv_bytes_per_token *= 2
    backend = GroupedBackend(groups, BLOCK_SIZE, lambda: make_attention_backend("torch", config, BLOCK_SIZE, CPU))
    first, second, third = backend.allocate(3)
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()


POOL_GROUPS = [KVGroup(None, [1, 4]), KVGroup(9, [0, 2]), KVGroup(9, [3])]


def make_config(**entries: Any) -> ModelConfig:
    return ModelConfig(
        family="llama", dtype_name="float32", vocab_size=9, hidden_size=32, intermediate_size=9, num_layers=5,
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
    layers = PoolLayers(make_config(), POOL_GROUPS)
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
