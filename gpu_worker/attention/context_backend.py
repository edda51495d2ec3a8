"""Spreads the KV of every sequence over ranks: context parallelism, as vLLM's decode context parallelism divides it.

The ranks of a group compute the layers together (tensor parallel), but each keeps all KV heads of some tokens instead
of some heads of all tokens: rank r of n has the r-th n-th of the tokens of every block. For attention the ranks
exchange their heads, each attends to its tokens with all queries, and the parts are merged by their log-sum-exp, as
split-KV decoding merges the parts of one sequence (Dao et al., 2023).
"""

import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from ..checkpoint.model_config import ModelConfig
from ..parallel.group import RankGroup
from .attention_backend import IntArray, KVCache, ScoreRule
from .cache import allocate_kv_caches, elements, write_slots


class ContextBackend:
    """Fulfils :class:`~..attention.attention_backend.AttentionBackend` for one rank, with PyTorch's operations.

    Plans take and return the rank's own heads, and the block tables of the engine, whose blocks all ranks share.
    """

    name = "context"
    reads_tails = False

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device, group: RankGroup) -> None:
        """``config``: with all KV heads of the model. ``block_size``: of the engine, a multiple of the group's size."""
        self.config = config
        self.device = device
        self.group = group
        self.block_size = block_size
        self.own_size = block_size // group.size
        """Tokens of a block that this rank keeps."""

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        return allocate_kv_caches(self.config, num_blocks, self.own_size, self.device, memory)

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "ContextPlan":
        return ContextPlan(self, cu_query_lens.tolist(), seq_lens.tolist(), block_tables.copy(), slot_mapping)

    def own_positions(self, length: int) -> Tensor:
        """Return the positions below ``length`` of the tokens that this rank keeps, in their order in the cache."""
        positions = torch.arange(length, device=self.device)
        return positions[positions % self.block_size // self.own_size == self.group.rank]


class ContextPlan:
    """Fulfils :class:`~..attention.attention_backend.AttentionPlan`."""

    def __init__(
        self,
        backend: ContextBackend,
        starts: list[int],
        seq_lens: list[int],
        block_tables: IntArray,
        slot_mapping: IntArray,
    ) -> None:
        """``starts``: where each request's tokens begin, and their number."""
        self._backend = backend
        self._starts = starts
        self._seq_lens = seq_lens
        self._tables = torch.from_numpy(block_tables.astype(np.int64)).to(backend.device)
        slots = torch.from_numpy(slot_mapping.astype(np.int64)).to(backend.device)
        offsets = slots % backend.block_size
        self._own_rows = (offsets // backend.own_size == backend.group.rank).nonzero()[:, 0]
        self._own_blocks = (slots // backend.block_size)[self._own_rows]
        self._own_offsets = (offsets % backend.own_size)[self._own_rows]

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        raise AssertionError("a rank has slots for its own tokens only; write_kv writes them")

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        key, value = (self._all_kv_heads(heads)[self._own_rows] for heads in (key, value))
        write_slots(key, value, kv_cache, self._own_blocks, self._own_offsets)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        group, num_own = self._backend.group, query.shape[1]
        queries = _by_head(group.all_gather(query))
        parts = group.all_gather(self._attend_own(queries, kv_cache, rule))
        mine = parts[:, :, group.rank * num_own : (group.rank + 1) * num_own]
        return _merge(mine, rule.sinks).to(query.dtype)

    def _all_kv_heads(self, heads: Tensor) -> Tensor:
        """Return [T, all KV heads, head_size]; where several ranks compute the same head, that of the first one."""
        gathered = _by_head(self._backend.group.all_gather(heads))
        return gathered[:, :: gathered.shape[1] // self._backend.config.num_kv_heads]

    def _attend_own(self, queries: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        """Return what the tokens of this rank contribute to each query, [T, num_heads, head_size + 2] float32: the sum
        of values times exp(score - largest), the sum of those weights, and the largest score."""
        found = queries.new_zeros((*queries.shape[:2], queries.shape[2] + 2), dtype=torch.float32)
        found[..., -1] = -torch.inf
        for request, length in enumerate(self._seq_lens):
            rows = slice(self._starts[request], self._starts[request + 1])
            positions = self._backend.own_positions(length)
            if len(positions):
                key, value = self._gather(kv_cache, request, len(positions), queries.shape[2])
                last = torch.arange(length - (rows.stop - rows.start), length, device=queries.device)
                found[rows] = _attend_part(queries[rows].float(), key, value, positions, last, rule)
        return found

    def _gather(self, kv_cache: KVCache, request: int, count: int, head_size: int) -> Tensor:
        """Return the keys and values of a request's first own tokens, [2, num_kv_heads, count, head_size]."""
        num_blocks = -(-count // self._backend.own_size)
        blocks = elements(kv_cache[:, self._tables[request, :num_blocks]])[..., :head_size].float()
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :count]


def _by_head(gathered: Tensor) -> Tensor:
    """Turn [ranks, T, heads, size] into [T, ranks * heads, size]."""
    return gathered.transpose(0, 1).flatten(1, 2)


def _attend_part(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, last: Tensor, rule: ScoreRule) -> Tensor:
    """Return what keys [num_kv_heads, s, size] at ``positions`` [s] contribute to queries [q, num_heads, size] at
    positions ``last`` [q], as :meth:`ContextPlan._attend_own` does."""
    key, value = (x.repeat_interleave(query.shape[1] // len(key), dim=0) for x in (key, value))
    scores = torch.einsum("qhd,hsd->qhs", query, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    hidden = positions > last[:, None]
    if rule.sliding_window is not None:
        hidden = hidden | (positions <= last[:, None] - rule.sliding_window)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest.clamp_min(torch.finfo(torch.float32).min)).exp()
    return torch.cat((torch.einsum("qhs,hsd->qhd", weights, value), weights.sum(-1, keepdim=True), largest), dim=-1)


def _merge(parts: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention [T, heads, size] from the contributions of all ranks, [ranks, T, heads, size + 2], and from
    the ``sinks`` [heads] of these heads, which the sum of weights holds once, whatever the number of ranks.

    Every query sees its own token, so a rank has a finite score for it.
    """
    sums, largest = parts[..., :-1], parts[..., -1:]
    most = largest.amax(0)
    if sinks is not None:
        most = most.maximum(sinks[:, None])
    merged = (sums * (largest - most).exp()).sum(0)
    weights = merged[..., -1:] if sinks is None else merged[..., -1:] + (sinks[:, None] - most).exp()
    return merged[..., :-1] / weights
