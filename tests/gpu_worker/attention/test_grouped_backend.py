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
from tokenloom.gpu_worker.attention.grouped_backend import GroupedBackend

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
    fewest = [part.prefixes.fewest_members for part in backend._backends if isinstance(part, CPUBackend)]
    assert fewest[0] < 100 < min(fewest[1:])


def test_unequal_groups_leave_a_tensor_unused() -> None:
    groups = [KVGroup(None, [2]), KVGroup(9, [0, 1])]
    config = shape(2)
    config.num_layers = 2
    config.kv_bytes_per_token *= 2
    backend = GroupedBackend(groups, BLOCK_SIZE, lambda: make_attention_backend("torch", config, BLOCK_SIZE, CPU))
    first, second, third = backend.allocate(3)
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
