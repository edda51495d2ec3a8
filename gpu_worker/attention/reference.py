"""Computes attention in the plainest way, slowly and in float32; tests compare the other backends with it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from ..checkpoint.model_config import ModelConfig
from .attention_backend import IntArray, KVCache, ScoreRule
from .cache import allocate_kv_caches, elements, write_slots


class ReferenceBackend:
    """Computes one request and one softmax at a time."""

    name = "reference"
    reads_tails = False

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device) -> None:
        self._config = config
        self._block_size = block_size
        self._device = device

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        return allocate_kv_caches(self._config, num_blocks, self._block_size, self._device, memory)

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
    ) -> "ReferencePlan":
        slots = torch.from_numpy(slot_mapping.astype(np.int64)).to(self._device)
        return ReferencePlan(cu_query_lens.tolist(), seq_lens.tolist(), block_tables.tolist(), slots, self._block_size)


@dataclass(frozen=True)
class ReferencePlan:
    """Holds the batch unchanged, in plain lists."""

    cu_query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    slots: Tensor
    block_size: int

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self.slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        write_slots(key, value, kv_cache, self.slots // self.block_size, self.slots % self.block_size)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        out = torch.empty_like(query)
        cached = elements(kv_cache)[..., : query.shape[2]]
        for request, (seq_len, table) in enumerate(zip(self.seq_lens, self.block_tables, strict=True)):
            rows = slice(self.cu_query_lens[request], self.cu_query_lens[request + 1])
            start = seq_len - (rows.stop - rows.start)
            first = 0 if rule.sliding_window is None else max(0, start - rule.sliding_window + 1)
            slots = [(table[p // self.block_size], p % self.block_size) for p in range(first, seq_len)]
            key, value = torch.stack([cached[:, block, :, offset] for block, offset in slots], dim=2).float()
            out[rows] = _attend_one(query[rows].float(), key, value, rule, first).to(out.dtype)
        return out


def _attend_one(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, first: int) -> Tensor:
    """Attend with [q, heads, size] over [kv_heads, s, size], whose first position is ``first``; the last query is the
    last position."""
    (num_queries, num_heads, _), (num_kv_heads, num_keys, _) = query.shape, key.shape
    seq_len = first + num_keys
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (key, value))
    scores = torch.einsum("qhd,hsd->hqs", query, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    positions = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    others = torch.arange(first, seq_len, device=query.device)
    hidden = others > positions
    if rule.sliding_window is not None:
        hidden = hidden | (others <= positions - rule.sliding_window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    return torch.einsum("hqs,hsd->qhd", scores.softmax(-1)[:, :, :num_keys], value)
