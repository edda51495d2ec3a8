"""Computes attention with the Triton kernel: one launch a layer, and one more where keys are split."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..device.device_link import copy_packed
from ..kernels.compiler import KernelsUnavailable
from ..kernels.triton.kv_cache import write_kv
from ..kernels.triton.launch import launch, power_of_2
from ..kernels.triton.paged_attention import attend, merge_splits
from .attention_backend import FP8_KV, AttentionPlan, IntArray, KVCache, ScoreRule
from .cache import LocalBackend, token_rows

_PROGRAMS = 264
"""Two for each multiprocessor of an H100: enough loads are in flight to use its memory's speed."""
_MOST_SPLITS = 32
_FEW_ROWS = 16
"""Steps of more tokens are not split: merging would be one kernel more, and they have enough programs."""


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
    return ProgramShape(64, tile, 4, 2) if padded_head > 128 else ProgramShape(128, tile, 8, 3)


def num_splits(num_tokens: int, num_entries: int, num_kv_heads: int, longest: int, tile: int) -> int:
    """Return over how many programs the keys of a query are split: a power of two. ``longest``: tokens of a request."""
    if num_tokens > _FEW_ROWS:
        return 1
    # Two for the shortest, too: whether a step of this size is split, which takes other kernels, then depends on its
    # size alone, and steps that warm the engine up compile all that requests need.
    wanted = min(_PROGRAMS // max(1, num_entries * num_kv_heads), max(2, -(-longest // tile)), _MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def work_entries(query_lens: IntArray, queries: int) -> npt.NDArray[np.int32]:
    """Return [entries, 2]: request and first query of each program's work, ``queries`` queries at a time.

    The last queries of a prompt come first, because they see most keys and take longest.
    """
    counts = -(-query_lens // queries)
    requests = np.repeat(np.arange(len(query_lens)), counts)
    firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    entries: npt.NDArray[np.int32] = np.stack((requests, firsts), axis=1).astype(np.int32)
    return entries if len(entries) == len(query_lens) else np.ascontiguousarray(entries[::-1])


_LARGEST_HEAD = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonBackend(LocalBackend):
    """Makes plans of arrays on the device. Raises :class:`KernelsUnavailable` for shapes that the kernel lacks."""

    name = "triton"

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device) -> None:
        if config.cache_head_size > _LARGEST_HEAD:
            raise KernelsUnavailable(f"heads of {config.head_size} are larger than {_LARGEST_HEAD}")
        if config.kv_dtype not in (config.dtype, FP8_KV) or config.dtype not in _DTYPES:
            raise KernelsUnavailable(f"{config.kv_dtype} in the KV cache of a {config.dtype} model")
        super().__init__(config, block_size, device)
        self.num_kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        """How many query heads share a KV head."""

    def shape(self, most_queries: int) -> ProgramShape:
        """Return the shape of the programs of a step whose requests have at most so many queries each."""
        return program_shape(most_queries, self.group, power_of_2(self._config.cache_head_size, 16), self._config.dtype)

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
        shape = self.shape(int(query_lens.max(initial=1)))
        work = work_entries(query_lens, shape.rows // self.group)
        longest = int(seq_lens.max(initial=1))
        splits = num_splits(int(cu_query_lens[-1]), len(work), self.num_kv_heads, longest, shape.tile)
        arrays = (work, cu_query_lens, seq_lens, block_tables, *(() if limits is None else (limits,)))
        slots, *others = copy_packed([slot_mapping.astype(np.int64), *map(_int32, arrays)], self.device)
        return self.plan_of(PlanTensors(slots, *others), shape, splits)

    def plan_of(self, tensors: "PlanTensors", shape: ProgramShape, splits: int) -> AttentionPlan:
        """Return a plan of arrays that are on the device, or that will be when a layer reads them."""
        return TritonPlan(self, tensors, shape, splits)


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """Holds the arrays of a step on the device; see ``kernels.triton.paged_attention.attend``."""

    slots: Tensor
    """[T] int64."""
    work: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    limits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Fulfils :class:`~.attention_backend.AttentionPlan`."""

    backend: TritonBackend
    tensors: PlanTensors
    shape: ProgramShape
    splits: int

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self.tensors.slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        key, value = token_rows(key), token_rows(value)
        num_tokens, num_kv_heads, head = key.shape
        launch(
            write_kv,
            (num_tokens, num_kv_heads),
            key,
            value,
            self.tensors.slots,
            *kv_cache.unbind(),
            key.stride(0),
            value.stride(0),
            HEAD=head,
            CACHE_HEAD=kv_cache.shape[4],
            PADDED_HEAD=power_of_2(head, 16),
            BLOCK=self.backend.block_size,
            IS_FP8=kv_cache.dtype == FP8_KV,
            num_warps=1,
        )

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        query = token_rows(query)
        num_tokens, num_heads, head = query.shape
        padded_head, splits, tensors = power_of_2(kv_cache.shape[4], 16), self.splits, self.tensors
        limits = tensors.limits if rule.sees_images else None
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        partial = sums = out
        if splits > 1:
            partial = torch.empty((num_tokens, num_heads, splits, padded_head), device=query.device)
            sums = torch.empty((num_tokens, num_heads, splits, 2), device=query.device)
        launch(
            attend,
            (len(tensors.work), kv_cache.shape[2], splits),
            query,
            *kv_cache.unbind(),
            out,
            partial,
            sums,
            tensors.work,
            tensors.query_starts,
            tensors.seq_lens,
            tensors.block_tables,
            query if rule.sinks is None else rule.sinks,
            tensors.work if limits is None else limits,
            rule.scale,
            rule.softcap or 0.0,
            rule.sliding_window or 0,
            query.stride(0),
            tensors.block_tables.stride(0),
            kv_cache.shape[2],
            GROUP=num_heads // kv_cache.shape[2],
            HEAD=head,
            CACHE_HEAD=kv_cache.shape[4],
            PADDED_HEAD=padded_head,
            BLOCK=self.backend.block_size,
            ROWS=self.shape.rows,
            TILE=self.shape.tile,
            IS_SPLIT=splits > 1,
            HAS_WINDOW=rule.sliding_window is not None,
            HAS_SOFTCAP=rule.softcap is not None,
            HAS_SINKS=rule.sinks is not None,
            HAS_LIMITS=limits is not None,
            num_warps=self.shape.warps,
            num_stages=self.shape.stages,
        )
        if splits > 1:
            constants = {"HEAD": head, "PADDED_HEAD": padded_head, "MOST_SPLITS": _MOST_SPLITS}
            launch(merge_splits, (num_tokens * num_heads,), partial, sums, out, splits, **constants, num_warps=2)
        return out


def _int32(values: IntArray) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int32)
