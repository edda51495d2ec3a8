"""Computes attention with the Triton kernel: one launch a layer."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..device.device_link import copy_packed
from ..kernels.compiler import KernelsUnavailable
from ..kernels.triton import launch, power_of_2
from ..kernels.triton.kv_cache import write_kv
from ..kernels.triton.paged_attention import attend
from .attention_backend import FP8_KV, AttentionPlan, IntArray, KVCache, PlanTensors, ScoreRule, WorkList
from .cache import LocalBackend, token_rows

_PROGRAMS = 264
"""Two for each multiprocessor of an H100: enough loads are in flight to use its memory's speed."""
_MOST_PARTS = 32
_LEAST_KEYS = 64
"""Keys of a part: a tile."""


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Holds how much one program of the attention kernel computes, and with what resources."""

    rows: int
    """Queries times query heads of one KV head."""
    tile: int
    """Keys that it reads at a time."""
    warps: int
    stages: int
    """Tiles that are loaded ahead, counting the one that is computed."""


def program_shape(most_queries: int, group: int, padded_head: int, dtype: torch.dtype) -> ProgramShape:
    """Choose the shape for a step whose requests have at most ``most_queries`` queries each.

    Decodes wait for memory: one matrix instruction of 16 rows is enough. Longer queries take the tensor cores' wide
    instruction, which has 64 rows for each 4 warps. ``group``: query heads that share a KV head.
    """
    if dtype == torch.float32:  # without tensor cores; a tile of keys takes twice the memory
        return ProgramShape(power_of_2(group, 16), 16 if padded_head > 128 else 32, 4, 2)
    tile = 32 if padded_head > 128 else 64
    if most_queries * group <= 16:
        return ProgramShape(16, tile, 4, 3)
    if most_queries == 1:
        return ProgramShape(power_of_2(group), tile, 4, 3)
    rows, warps, stages = (64, 4, 2) if padded_head > 128 else (128, 8, 3)
    # At least one query with all of its heads: a program of fewer rows than these would compute none.
    return ProgramShape(power_of_2(group, rows), tile, warps, stages)


def key_parts(seq_lens: IntArray, num_kv_heads: int) -> IntArray:
    """Return into how many parts the keys of decodes, [n], are split, so that each program has as much work.

    They are at most n and :func:`most_parts` in all.
    """
    # By work and not by the number of requests: one of 131,072 tokens among 16 short ones would be read by one program
    # for each KV head while all others are idle.
    keys = -(-int(seq_lens.sum()) * num_kv_heads // _PROGRAMS)
    keys = max(_LEAST_KEYS, -(-keys // _LEAST_KEYS) * _LEAST_KEYS)
    parts: IntArray = np.clip(-(-seq_lens // keys), 1, _MOST_PARTS)
    return parts


def most_parts(num_kv_heads: int) -> int:
    """Return how many parts of keys a step has at most beyond one for each request."""
    return _PROGRAMS // num_kv_heads


def work_entries(query_lens: IntArray, queries: int, parts: IntArray | None = None) -> npt.NDArray[np.int32]:
    """Return [entries, 4] for programs that have ``queries`` queries each: request, first query, part of the keys, and
    how many parts there are. ``parts``: of each request, more than one only where it has one query; None: one each.

    The last queries of a prompt come first, because they see most keys and take longest.
    """
    counts = -(-query_lens // queries)
    requests = np.repeat(np.arange(len(query_lens)), counts)
    firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    if counts.max(initial=0) > 1:
        requests, firsts = requests[::-1], firsts[::-1]
    of_entries = np.ones(len(requests), dtype=np.int64) if parts is None else parts[requests]
    first_entries = np.repeat(np.cumsum(of_entries) - of_entries, of_entries)
    columns = [np.repeat(each, of_entries) for each in (requests, firsts, of_entries)]
    columns.insert(2, np.arange(len(first_entries)) - first_entries)
    entries: npt.NDArray[np.int32] = np.stack(columns, axis=1).astype(np.int32)
    return entries


_LARGEST_HEAD = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonBackend(LocalBackend):
    """Makes plans of arrays on the device. Raises :class:`KernelsUnavailable` for shapes that the kernel lacks."""

    name = "triton"
    plans_on_host = False
    captures_prompts = True

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device) -> None:
        if config.cache_head_size > _LARGEST_HEAD:
            raise KernelsUnavailable(f"heads of {config.head_size} are larger than {_LARGEST_HEAD}")
        if config.kv_dtype not in (config.dtype, FP8_KV) or config.dtype not in _DTYPES:
            raise KernelsUnavailable(f"{config.kv_dtype} in the KV cache of a {config.dtype} model")
        super().__init__(config, block_size, device)
        self.num_kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        """How many query heads share a KV head."""
        self._counters: list[Tensor] = []

    def shape(self, most_queries: int) -> ProgramShape:
        """Return the shape of the programs of a step whose requests have at most so many queries each."""
        return program_shape(most_queries, self.group, power_of_2(self._config.cache_head_size, 16), self._config.dtype)

    def can_split(self, shape: ProgramShape) -> bool:
        """Return whether programs of this shape compute parts of keys: those of decodes. Others have so many queries
        that registers would not hold what merging needs."""
        return shape == self.shape(1)

    def room(self, tokens: int, requests: int) -> tuple[int, int]:
        shape = self.shape(tokens)
        full, single = tokens // max(1, shape.rows // self.group), requests + most_parts(self.num_kv_heads)
        # Each request may end with an entry that is not full.
        return (0, full + single) if self.can_split(shape) else (full + requests, single)

    def work(self, query_lens: IntArray, seq_lens: IntArray, most_queries: int, room: int = 0) -> WorkList:
        shape, decoding = self.shape(most_queries), query_lens == 1
        queries, parts = max(1, shape.rows // self.group), np.ones(len(query_lens), dtype=np.int64)
        parts[decoding] = key_parts(seq_lens[decoding], self.num_kv_heads)
        if self.can_split(shape):
            return WorkList(work_entries(query_lens, queries, parts), 0)
        # A program for many queries would compute as many rows for the single one of a decode, and all of its keys.
        wide = work_entries(np.where(decoding, 0, query_lens), queries)
        padding = np.full((max(0, room - len(wide)), 4), -1, dtype=np.int32)
        narrow = work_entries(decoding.astype(np.int64), 1, parts)
        return WorkList(np.concatenate((wide, padding, narrow)), len(wide) + len(padding))

    def counters(self, count: int) -> Tensor:
        """Return ``count`` zeros, int32, on the device, which every launch leaves as zeros."""
        # Graphs hold the addresses of those before, which stay where they are.
        if not self._counters or len(self._counters[-1]) < count:
            self._counters.append(torch.zeros(power_of_2(count, 1 << 12), dtype=torch.int32, device=self.device))
        return self._counters[-1]

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> AttentionPlan:
        """Prepare a step as :class:`~.attention_backend.AttentionBackend` says, with one copy to the device."""
        query_lens = np.diff(cu_query_lens)
        most_queries = int(query_lens.max(initial=1))
        work, num_wide = self.work(query_lens, seq_lens, most_queries)
        arrays = (work, cu_query_lens, seq_lens, block_tables, *(() if limits is None else (limits,)))
        slots, *others = copy_packed([slot_mapping.astype(np.int64), *map(_int32, arrays)], self.device)
        return self.plan_of(PlanTensors(slots, *others), most_queries, num_wide)

    def plan_of(
        self, tensors: PlanTensors, most_queries: int, num_wide: int, *, in_graph: bool = False
    ) -> AttentionPlan:
        return TritonPlan(self, tensors, self.shape(most_queries), num_wide)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Fulfils :class:`~.attention_backend.AttentionPlan`."""

    backend: TritonBackend
    tensors: PlanTensors
    shape: ProgramShape
    """Of the programs of the first entries."""
    num_wide: int
    """How many these are; the others have the shape for one query."""

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self.tensors.slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        write_rows(key, value, kv_cache, self.tensors.slots)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        query = token_rows(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        work, num_wide = self.tensors.work, self.num_wide
        if num_wide:
            self._launch(query, kv_cache, rule, out, self.shape, work[:num_wide])
        self._launch(query, kv_cache, rule, out, self.backend.shape(1), work[num_wide:])
        return out

    def _launch(
        self, query: Tensor, kv_cache: KVCache, rule: ScoreRule, out: Tensor, shape: ProgramShape, work: Tensor
    ) -> None:
        """Compute some entries of the list by programs of one shape."""
        (_, num_heads, head), num_entries, num_kv_heads = query.shape, len(work), kv_cache.shape[2]
        padded_head, tensors, backend = power_of_2(kv_cache.shape[4], 16), self.tensors, self.backend
        limits = tensors.limits if rule.sees_images else None
        partial = sums = out
        arrived, can_split = work, backend.can_split(shape)
        if can_split:
            partial = torch.empty((num_entries, num_heads, padded_head), device=query.device)
            sums = torch.empty((num_entries, num_heads, 2), device=query.device)
            arrived = backend.counters(num_entries * num_kv_heads)
        launch(
            attend,
            (num_entries, num_kv_heads),
            query,
            *kv_cache.unbind(),
            out,
            partial,
            sums,
            arrived,
            work,
            tensors.query_starts,
            tensors.seq_lens,
            tensors.block_tables,
            query if rule.sinks is None else rule.sinks,
            work if limits is None else limits,
            rule.scale,
            rule.softcap or 0.0,
            rule.sliding_window or 0,
            query.stride(0),
            tensors.block_tables.stride(0),
            num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD=head,
            CACHE_HEAD=kv_cache.shape[4],
            PADDED_HEAD=padded_head,
            BLOCK=backend.block_size,
            ROWS=shape.rows,
            TILE=shape.tile,
            CAN_SPLIT=can_split,
            HAS_WINDOW=rule.sliding_window is not None,
            HAS_SOFTCAP=rule.softcap is not None,
            HAS_SINKS=rule.sinks is not None,
            HAS_LIMITS=limits is not None,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )


def write_rows(key: Tensor, value: Tensor, kv_cache: KVCache, slots: Tensor) -> None:
    """Store [T, num_kv_heads, head_size] keys and values in ``slots`` [T]; a negative one is that of padding."""
    key, value = token_rows(key), token_rows(value)
    num_tokens, num_kv_heads, head = key.shape
    launch(
        write_kv,
        (num_tokens, num_kv_heads),
        key,
        value,
        slots,
        *kv_cache.unbind(),
        key.stride(0),
        value.stride(0),
        HEAD=head,
        CACHE_HEAD=kv_cache.shape[4],
        PADDED_HEAD=power_of_2(head, 16),
        BLOCK=kv_cache.shape[3],
        IS_FP8=kv_cache.dtype == FP8_KV,
        num_warps=1,
    )


def _int32(values: IntArray) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int32)
