"""Random batches over random block tables, and what a backend makes of them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenloom.gpu_worker.attention.attention_backend import (
    FP8_KV,
    AttentionBackend,
    AttentionPlan,
    PlanTensors,
    ScoreRule,
)
from tokenloom.gpu_worker.attention.cache import quantize, to_fp8
from tokenloom.gpu_worker.attention.shared_prefix import SharedPrefixes, SharingBackend
from tokenloom.gpu_worker.checkpoint.model_config import SCALE_BYTES

BLOCK_SIZE = 16
HEAD_SIZE = 32
CPU = torch.device("cpu")


@dataclass
class Step:
    """A batch over a cache that holds random earlier keys and values."""

    arrays: dict[str, Any]
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor


def shape(
    num_kv_heads: int,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    head_size: int = HEAD_SIZE,
    kv_dtype: torch.dtype | None = None,
) -> Any:
    """``kv_dtype``: None, int8 or 8-bit floats."""
    cache_size = -(-head_size // 16) * 16
    row_bytes = cache_size * (kv_dtype or dtype).itemsize + (SCALE_BYTES if kv_dtype == torch.int8 else 0)
    return SimpleNamespace(
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        cache_head_size=cache_size,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        kv_row_bytes=row_bytes,
        kv_planes=2,
        latent=None,
        kv_shapes=(),
        scales_kv=False,
        states=None,
        cross_rows=0,
        attention_chunks=(),
        kv_bytes_per_token=2 * num_kv_heads * row_bytes,
    )


def make_step(query_lens: list[int], seq_lens: list[int], num_heads: int, config: Any) -> Step:
    rng = np.random.default_rng(sum(query_lens) + sum(seq_lens))
    generator = torch.Generator().manual_seed(sum(seq_lens))
    width = max(-(-length // BLOCK_SIZE) for length in seq_lens)
    num_blocks = len(seq_lens) * width
    tables = rng.permutation(num_blocks).reshape(len(seq_lens), width).astype(np.int32)
    positions = [np.arange(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)]
    slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, p in zip(tables, positions, strict=True)]
    arrays = {
        "cu_query_lens": np.cumsum([0, *query_lens]).astype(np.int32),
        "seq_lens": np.array(seq_lens, dtype=np.int32),
        "block_tables": tables,
        "slot_mapping": np.concatenate(slots),
    }

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(config.dtype)

    total = sum(query_lens)
    cache = normal(2, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.cache_head_size)
    cache[..., config.head_size :] = 0
    if config.kv_dtype == torch.int8:
        cache = rounded(cache)
    elif config.kv_dtype == FP8_KV:
        cache = to_fp8(cache)
    return Step(
        arrays,
        query=normal(total, num_heads, config.head_size),
        key=normal(total, config.num_kv_heads, config.head_size),
        value=normal(total, config.num_kv_heads, config.head_size),
        cache=cache,
    )


Groups = list[tuple[list[int], int]]
"""Requests that begin alike, and how many blocks they share."""


def shared_step(config: Any, lengths: list[int], groups: Groups) -> Step:
    """A step of decodes whose tables begin alike, group by group."""
    step = make_step([1] * len(lengths), lengths, config.num_heads, config)
    tables, last = step.arrays["block_tables"], np.array(lengths) - 1
    for members, blocks in groups:
        tables[members, :blocks] = tables[members[0], :blocks]
    block = tables[np.arange(len(lengths)), last // BLOCK_SIZE]
    step.arrays["slot_mapping"] = block * BLOCK_SIZE + last % BLOCK_SIZE
    return step


def prefixes_of(groups: Groups) -> SharedPrefixes:
    members = [request for each, _ in groups for request in each]
    starts = np.cumsum([0, *(len(each) for each, _ in groups)])
    lengths = [blocks * BLOCK_SIZE for _, blocks in groups]
    return SharedPrefixes(*(np.array(each, dtype=np.int32) for each in (members, starts, lengths)))


def shared_plan(
    backend: SharingBackend,
    arrays: dict[str, Any],
    prefixes: SharedPrefixes,
    padded: int = 0,
    device: torch.device = CPU,
) -> AttentionPlan:
    """A plan of a step in which requests read together what they share. ``padded``: to so many requests."""
    count = len(arrays["seq_lens"])
    padded = padded or count
    room = backend.shared_room(padded)
    assert room is not None, "too few requests"
    work = backend.shared_work(prefixes, arrays["seq_lens"], room)
    starts = np.append(arrays["cu_query_lens"], [count] * (padded - count))
    ints = (work, starts, arrays["seq_lens"], arrays["block_tables"])
    tensors = [torch.from_numpy(np.ascontiguousarray(each, dtype=np.int32)).to(device) for each in ints]
    return backend.shared_plan_of(PlanTensors(torch.from_numpy(arrays["slot_mapping"]).to(device), *tensors), room)


def with_images(step: Step) -> Step:
    """Let the tokens of some images in each chunk see all of theirs: one at its beginning, which earlier tokens of the
    image may precede, and others of up to 40 tokens behind it."""
    rng = np.random.default_rng(len(step.query))
    starts = step.arrays["cu_query_lens"].tolist()
    limits: list[int] = []
    for start, end, length in zip(starts, starts[1:], step.arrays["seq_lens"].tolist(), strict=False):
        position = length - (end - start)
        while position < length:
            stop = min(length, position + int(rng.integers(1, 40)))
            is_image = rng.random() < 0.6 or stop == length
            limits += [stop - 1] * (stop - position) if is_image else range(position, stop)
            position = stop
    step.arrays["limits"] = np.array(limits, dtype=np.int64)
    return step


def rounded(cache: Tensor) -> Tensor:
    """An int8 cache of these elements, whatever their size."""
    numbers, scales = quantize(cache)
    parts = numbers.flatten(-2), scales.view(torch.int8)
    return torch.cat(parts, dim=-1).unflatten(-1, (BLOCK_SIZE, -1))


def owned_slots(step: Step) -> Tensor:
    """[num_blocks, block_size], whether a slot holds a token of the step's requests."""
    owned = torch.zeros(step.cache.shape[1], BLOCK_SIZE, dtype=torch.bool)
    for seq_len, table in zip(step.arrays["seq_lens"].tolist(), step.arrays["block_tables"].tolist(), strict=True):
        for position in range(seq_len):
            owned[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    return owned


def run(backend: AttentionBackend, step: Step, window: int | None) -> tuple[Tensor, Tensor]:
    return run_rule(backend, step, ScoreRule(step.query.shape[2] ** -0.5, window))


def run_rule(backend: AttentionBackend, step: Step, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    cache = step.cache.clone()
    plan = backend.plan(**step.arrays)
    plan.write_kv(step.key, step.value, cache)
    return plan.attend(step.query, cache, rule), cache


def sees_images(rule: ScoreRule) -> ScoreRule:
    return replace(rule, sees_images=True)


def rules(num_heads: int, window: int | None) -> dict[str, ScoreRule]:
    """Rules whose limit bends the random scores of a step, and whose sinks weigh as much as several positions."""
    sinks = torch.linspace(-2, 4, num_heads)
    return {
        "softcap": ScoreRule(0.5, window, softcap=3.0),
        "sinks": ScoreRule(0.5, window, sinks=sinks),
        "both": ScoreRule(0.5, window, softcap=3.0, sinks=sinks),
    }


BATCHES = {
    "one decode": ([1], [37]),
    "first token": ([1], [1]),
    "decodes of many lengths": ([1] * 9, [1, 16, 17, 32, 33, 100, 101, 250, 500]),
    "decodes of one length": ([1] * 4, [48] * 4),
    "one prefill": ([77], [77]),
    "prefills": ([5, 16, 64, 33], [5, 16, 64, 33]),
    "chunks of longer prompts": ([10, 16, 1, 50], [200, 32, 90, 51]),
    "decodes between prefills": ([1, 20, 1, 7, 1], [64, 20, 5, 130, 17]),
}
