"""Computes attention with the C++ kernels: without a gather, without padding, in one call per layer."""

import sys
from ctypes import CDLL, byref
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.local_config import kernel_lack
from ..checkpoint.model_config import ModelConfig
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import AttentionArgs, load_attention
from ..kernels.threads import kernel_threads
from .attention_backend import TOKENWISE, IntArray, KVCache, ScoreRule
from .cache import LocalBackend, padded, pointers, token_rows
from .shared_prefix import Int32s, SharedPrefixes, SharedPrefixFinder


@dataclass(slots=True)
class PlanArrays:
    """Holds one step's arrays; see :meth:`.attention_backend.AttentionBackend.plan`."""

    query_starts: Int32s
    """[n + 1]"""
    seq_lens: Int32s
    """[n]"""
    block_tables: Int32s
    """[n, width]"""
    slots: Tensor
    """[T] int64."""
    prefixes: SharedPrefixes
    num_requests: int
    num_groups: int
    """How many groups of requests ``prefixes`` lists."""
    limits: Int32s | None = None
    """[T]"""

    @classmethod
    def copied(
        cls,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        finder: SharedPrefixFinder,
        limits: IntArray | None = None,
    ) -> Self:
        """Copy the arrays of a step, because the caller may reuse them."""
        tables, lengths = _int32(block_tables), _int32(seq_lens)
        prefixes = finder.find(np.diff(cu_query_lens), lengths, tables)
        slots = torch.from_numpy(slot_mapping.astype(np.int64))
        seen = None if limits is None else _int32(limits)
        return cls(_int32(cu_query_lens), lengths, tables, slots, prefixes, len(lengths), len(prefixes.lengths), seen)


def _int32(values: IntArray) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32, order="C")


_FEWEST_ROWS = 24
"""Reading a shared prefix once pays from this many query heads of a KV head on, counted over all members."""
_WIDEST_WINDOW = 1 << 30


class CPUBackend(LocalBackend):
    """Makes plans that hold the step's arrays as the kernel reads them.

    Raises :class:`KernelsUnavailable` without a compiler, and for shapes that the kernel does not support.
    """

    name = "cpu"
    span = 0
    """Positions of the pieces into which the kernel cuts the attention of every token; 0: as many as suit the batch for
    one that is decoded, and tiles of tokens for others."""

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device, march: str = "native") -> None:
        if lack := kernel_lack(config, block_size):
            raise KernelsUnavailable(lack)
        super().__init__(config, block_size, device)
        self._march = march
        self._is_int8 = config.kv_dtype == torch.int8
        self._kernels = load_attention(config.cache_head_size, march, int8=self._is_int8)
        self.prefixes = SharedPrefixFinder(block_size, max(2, _FEWEST_ROWS * config.num_kv_heads // config.num_heads))

    def limiting_kernels(self) -> CDLL:
        """Return the kernels that limit scores. The first call compiles them; warming up the model makes it."""
        return load_attention(self._config.cache_head_size, self._march, softcap=True, int8=self._is_int8)

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "CPUPlan":
        arrays = (cu_query_lens, seq_lens, block_tables, slot_mapping)
        return CPUPlan(self, PlanArrays.copied(*arrays, self.prefixes, limits))


class TokenwiseBackend(CPUBackend):
    """Makes plans that compute each token as if it was decoded alone, so that its attention has the same bits in every
    batch and chunk, with a cached prefix or without, and as a draft."""

    # The order of a token's sums follows from its own position alone: pieces are counted from its first position on,
    # and no shared prefix joins it with other requests. Longer pieces would leave threads idle beside a single long
    # request, shorter ones make more partial results of a prompt.
    span = 1024

    def __init__(
        self, config: ModelConfig, block_size: int, device: torch.device, march: str = "native", name: str = TOKENWISE
    ) -> None:
        super().__init__(config, block_size, device, march)
        self.name = name
        self.prefixes = SharedPrefixFinder(block_size, sys.maxsize)


class CPUPlan:
    """Holds the step's arrays and the kernel's arguments, a few of which each layer changes."""

    def __init__(self, backend: CPUBackend, arrays: PlanArrays) -> None:
        config, tables, prefixes = backend._config, arrays.block_tables, arrays.prefixes
        self._backend = backend
        self._kernels = backend._kernels
        self._head_size, self._cache_head_size = config.head_size, config.cache_head_size
        self._arrays = arrays
        self._slots = arrays.slots
        self._is_bf16 = config.dtype == torch.bfloat16
        self._num_groups = arrays.num_groups
        self._args = AttentionArgs(
            block_tables=tables.ctypes.data,
            query_starts=arrays.query_starts.ctypes.data,
            seq_lens=arrays.seq_lens.ctypes.data,
            members=prefixes.members.ctypes.data,
            group_starts=prefixes.starts.ctypes.data,
            shared_lens=prefixes.lengths.ctypes.data,
            num_requests=arrays.num_requests,
            num_kv_heads=config.num_kv_heads,
            block_size=backend.block_size,
            table_stride=tables.shape[1],
            span=backend.span,
            is_bf16=self._is_bf16,
            num_threads=kernel_threads(),
        )

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        key, value = (token_rows(padded(x, self._cache_head_size)) for x in (key, value))
        self._kernels.write_kv(
            self._is_bf16,
            key.data_ptr(),
            value.data_ptr(),
            *pointers(kv_cache),
            self._slots.data_ptr(),
            len(key),
            self._args.num_kv_heads,
            self._args.block_size,
            key.stride(0),
            value.stride(0),
        )

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        query = token_rows(padded(query, self._cache_head_size))
        out = torch.empty(query.shape, dtype=query.dtype)
        args = self._args
        args.query, args.out = query.data_ptr(), out.data_ptr()
        args.key, args.value = pointers(kv_cache)
        args.num_heads, args.query_stride = query.shape[1], query.stride(0)
        args.window = min(rule.sliding_window or 0, _WIDEST_WINDOW)
        args.num_groups = 0 if rule.sliding_window else self._num_groups
        args.scale = rule.scale
        args.sinks = None if rule.sinks is None else rule.sinks.data_ptr()
        if (limits := self._arrays.limits) is not None:
            args.limits = limits.ctypes.data if rule.sees_images else None
        kernels = self._kernels
        if rule.softcap is not None:
            kernels, args.softcap = self._backend.limiting_kernels(), rule.softcap
        kernels.attend(byref(args))
        return out if self._head_size == self._cache_head_size else out[..., : self._head_size]
