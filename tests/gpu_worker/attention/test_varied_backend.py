"""Layers that see chunks of positions, and layers with other heads than the widest, are computed by every backend."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, CPU, Step, make_step, run_rule, shape
from tests.gpu_worker.attention.test_grouped_backend import make_config
from tokenloom.engine_core.data.kv_groups import KVGroup
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.attention_backend import AttentionBackend, ScoreRule
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.grouped_backend import PoolLayers
from tokenloom.gpu_worker.checkpoint.model_config import KVShape, ModelConfig

BACKENDS = ["torch", "reference", *(["cpu"] if shutil.which("g++") else [])]
CHUNK = 2 * BLOCK_SIZE
WIDE, NARROW = KVShape(4, 16), KVShape(1, 32)
SHAPES = (WIDE, NARROW, WIDE, WIDE, NARROW)


def chunked(num_layers: int = 5) -> ModelConfig:
    return replace(make_config(attention_chunks=(CHUNK,) * num_layers), num_heads=4, head_size=32)


def make(name: str, config: ModelConfig) -> AttentionBackend:
    return make_attention_backend(name, config, BLOCK_SIZE, CPU)


def attend_in_chunks(step: Step, cache: Tensor) -> Tensor:
    """Attention of each query by itself, over the positions from its chunk's begin to its own."""
    rows, starts = [], step.arrays["cu_query_lens"].tolist()
    requests = zip(step.arrays["seq_lens"].tolist(), step.arrays["block_tables"].tolist(), strict=True)
    for request, (end, table) in enumerate(requests):
        queries = step.query[starts[request] : starts[request + 1]]
        for position, query in enumerate(queries, end - len(queries)):
            seen = range(position // CHUNK * CHUNK, position + 1)
            places = [(table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in seen]
            key, value = torch.stack([cache[:, block, :, offset] for block, offset in places], 2)
            key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
            weights = torch.einsum("hd,hsd->hs", query, key).mul(0.3).softmax(-1)
            rows.append(torch.einsum("hs,hsd->hd", weights, value))
    return torch.stack(rows)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_token_sees_its_chunk_up_to_itself(name: str, batch: str) -> None:
    step = make_step(*BATCHES[batch], 4, shape(2))
    found, cache = run_rule(make(name, chunked()), step, ScoreRule(0.3, chunk=CHUNK))
    torch.testing.assert_close(found, attend_in_chunks(step, cache), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_of_the_same_step_may_see_everything(name: str) -> None:
    step = make_step(*BATCHES["decodes between prefills"], 4, shape(2))
    rule = ScoreRule(0.3)
    plain = replace(chunked(), attention_chunks=())
    assert torch.equal(run_rule(make(name, chunked()), step, rule)[0], run_rule(make(name, plain), step, rule)[0])


def test_chunks_are_whole_blocks() -> None:
    with pytest.raises(ValueError, match="block_size: 16 tokens do not divide the model's attention chunks of 40"):
        make("torch", replace(chunked(), attention_chunks=(40, None)))


def shaped_config() -> ModelConfig:
    return replace(make_config(kv_shapes=SHAPES), num_heads=4, num_kv_heads=4, head_size=16)


@pytest.mark.parametrize("batch", ["prefills", "decodes between prefills"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_each_layer_has_its_own_heads_in_blocks_of_one_size(name: str, grouped: bool, batch: str) -> None:
    groups = [KVGroup(None, [1, 4]), KVGroup(9, [0, 2]), KVGroup(9, [3])] if grouped else []
    layers = PoolLayers(shaped_config(), groups)
    assert layers.layout(16) == "HND/fp32/5x4x16+1x32/16" + ("/full,9,9" if grouped else "")
    backend = layers.make_backend(lambda config: make(name, config), BLOCK_SIZE)
    step = make_step(*BATCHES[batch], 4, shape(WIDE.num_heads, head_size=WIDE.head_size))
    blocks = step.cache.shape[1]
    memory = PoolMemory.allocate(blocks * BLOCK_SIZE * layers.config.kv_bytes_per_token, shared=False)
    arrays = step.arrays
    if grouped:
        arrays = arrays | {
            "block_tables": arrays["block_tables"].repeat(len(groups), axis=1),
            "slot_mapping": arrays["slot_mapping"][None].repeat(len(groups), axis=0),
        }
    caches = backend.allocate(blocks, memory)
    plan = backend.plan(**arrays)
    for layer, (heads, size) in enumerate(SHAPES):
        own = make_step(*BATCHES[batch], 4, shape(heads, head_size=size))
        narrow = replace(shaped_config(), kv_shapes=(), num_kv_heads=heads, head_size=size)
        expected, cache = run_rule(make(name, narrow), own, ScoreRule(0.3))
        caches[layer].zero_()
        # The first of the smaller blocks in each block is the layer's.
        ratio = caches[layer].shape[1] // blocks
        caches[layer][:, ::ratio].copy_(own.cache)
        plan.write_kv(own.key, own.value, caches[layer])
        assert torch.equal(plan.attend(own.query, caches[layer], ScoreRule(0.3)), expected)
        assert torch.equal(caches[layer][:, ::ratio], cache)
