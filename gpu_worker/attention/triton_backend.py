"""Computes attention with the Triton kernel: one launch a layer."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..device.device_link import copy_packed
from ..kernels.compiler import KernelsUnavailable
from ..kernels.triton import launch, power_of_2
from ..kernels.triton.kv_cache import write_kv
from ..kernels.triton.paged_attention import attend, attend_shared
from .attention_backend import FP8_KV, AttentionPlan, IntArray, KVCache, PlanTensors, ScoreRule, WorkList
from .cache import LocalBackend, token_rows
from .shared_prefix import SharedPrefixes, SharedRoom, find_shared_prefixes, shared_entries

_PROGRAMS = 264
"""Two for each multiprocessor of an H100: enough loads are in flight to use its memory's speed."""
_MOST_PARTS = 32
_LEAST_KEYS = 64
"""Keys of a part: a tile."""
FEWEST_SHARING = 8
"""Fewer requests do not read their common keys together."""
_FEWEST_SHARED = 256
"""Tokens: fewer common keys are not read together."""
_LEAST_SAVED = 16 << 20
"""Bytes of a layer: 5 µs of an H100's memory. A call within a graph takes 1 to 3 µs, and so does merging."""


_WARPS_AND_STAGES = {8: (8, 2)}
"""Of programs of 64 rows and heads of 256, by the first number of a GPU's compute capability; others have 4 and 3. They
need nearly all registers: with 4 warps an A100 spills, with two stages an H100, with 8 warps a B200."""


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


def program_shape(
    most_queries: int, group: int, padded_head: int, dtype: torch.dtype, generation: int = 0
) -> ProgramShape:
    """Choose the shape for a step whose requests have at most ``most_queries`` queries each.

    Decodes wait for memory: one matrix instruction of 16 rows is enough. Longer queries take the tensor cores' wide
    instruction, which has 64 rows for each 4 warps. ``group``: query heads that share a KV head. ``generation``: as
    :func:`generation_of` returns it.
    """
    if dtype == torch.float32:  # without tensor cores; a tile of keys takes twice the memory
        return ProgramShape(power_of_2(group, 16), 16 if padded_head > 128 else 32, 4, 2)
    tile = 32 if padded_head > 128 else 64
    if most_queries * group <= 16:
        return ProgramShape(16, tile, 4, 3)
    if most_queries == 1:
        return ProgramShape(power_of_2(group), tile, 4, 3)
    rows, (warps, stages) = (64, _WARPS_AND_STAGES.get(generation, (4, 3))) if padded_head > 128 else (128, (8, 3))
    if generation == 8 and padded_head == 128:
        tile = 32  # an A100 spills 40 bytes a thread with 64 keys
    if generation == 10 and padded_head <= 64:
        warps = 4  # with 8 a B200 spills 16 bytes a thread where a layer has a window
    # At least one query with all of its heads: a program of fewer rows than these would compute none.
    return ProgramShape(power_of_2(group, rows), tile, warps, stages)


def shared_shape(group: int, padded_head: int, dtype: torch.dtype) -> ProgramShape:
    """Choose the shape of programs that compute queries of several requests over keys that these share."""
    if dtype == torch.float32:
        return program_shape(1, group, padded_head, dtype)
    # The rows of one wide instruction for 4 warps, so that a few requests waste few of them. With heads of 256, 4 warps
    # spill on a B200.
    tile, warps, stages = (32, 8, 2) if padded_head > 128 else (64, 4, 3)
    return ProgramShape(power_of_2(group, 64), tile, warps, stages)


def generation_of(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability; 0 for other devices."""
    is_on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device)[0] if is_on_gpu else 0


def is_worth_sharing(prefixes: SharedPrefixes, queries: int, token_bytes: int) -> bool:
    """Return whether reading the common keys of these groups for ``queries`` requests at a time saves more than another
    call in each layer costs.

    ``token_bytes``: of keys and values of a token in a layer. It counts what all requests would read, although a GPU's
    cache may hold some of it.
    """
    sizes = np.diff(prefixes.starts)
    fewer = sizes + sizes // -queries  # reads: one for each program instead of one for each request
    return int((fewer * prefixes.lengths.astype(np.int64)).sum()) * token_bytes >= _LEAST_SAVED


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
        self._token_bytes = 2 * config.num_kv_heads * config.cache_head_size * config.kv_dtype.itemsize
        self._padded_head = power_of_2(config.cache_head_size, 16)
        self._generation = generation_of(device)
        self.shared_shape = shared_shape(self.group, self._padded_head, config.dtype)
        self._counters: list[Tensor] = []

    def shape(self, most_queries: int) -> ProgramShape:
        """Return the shape of the programs of a step whose requests have at most so many queries each."""
        return program_shape(most_queries, self.group, self._padded_head, self._config.dtype, self._generation)

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

    def shared_room(self, requests: int) -> SharedRoom | None:
        if requests < FEWEST_SHARING:
            return None
        return SharedRoom.of(requests, self._sharing_queries, most_parts(self.num_kv_heads), FEWEST_SHARING)

    @property
    def _sharing_queries(self) -> int:
        return self.shared_shape.rows // self.group

    def find_shared(self, seq_lens: IntArray, block_tables: IntArray) -> SharedPrefixes | None:
        if len(seq_lens) < FEWEST_SHARING:
            return None
        step = (np.ones(len(seq_lens), dtype=np.int32), seq_lens, block_tables)
        found = find_shared_prefixes(*step, self.block_size, FEWEST_SHARING, _FEWEST_SHARED)
        return found if is_worth_sharing(found, self._sharing_queries, self._token_bytes) else None

    def shared_work(self, prefixes: SharedPrefixes, seq_lens: IntArray, room: SharedRoom) -> npt.NDArray[np.int32]:
        shared = shared_entries(prefixes, self._sharing_queries, self._split, room)
        own = seq_lens.astype(np.int64)
        own[prefixes.members] -= np.repeat(prefixes.lengths, np.diff(prefixes.starts))
        return np.concatenate((shared, work_entries(np.ones(len(own), dtype=np.int64), 1, self._split(own))))

    def _split(self, lengths: IntArray) -> IntArray:
        return key_parts(lengths, self.num_kv_heads)

    def constants(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule, shape: ProgramShape) -> dict[str, int]:
        """Return for what both kernels are compiled."""
        (_, num_heads, head), (_, _, num_kv_heads, _, cache_head) = query.shape, kv_cache.shape
        return {
            "GROUP": num_heads // num_kv_heads,
            "HEAD": head,
            "CACHE_HEAD": cache_head,
            "PADDED_HEAD": power_of_2(cache_head, 16),
            "BLOCK": self.block_size,
            "ROWS": shape.rows,
            "TILE": shape.tile,
            "HAS_SOFTCAP": rule.softcap is not None,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }

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

    def shared_plan_of(self, tensors: PlanTensors, room: SharedRoom) -> AttentionPlan:
        programs, members, requests, own = torch.split(tensors.work, [*room, len(tensors.work) - sum(room)])
        return SharedPlan(TritonPlan(self, replace(tensors, work=own), self.shape(1), 0), programs, members, requests)


@dataclass(frozen=True, slots=True)
class _Found:
    """Holds what programs found in shared keys, for those that merge it with what they find in a request's own."""

    shares: Tensor
    partial: Tensor
    sums: Tensor
    rows: int


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

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule, shared: _Found | None = None) -> Tensor:
        """``shared``: what a step that only decodes has found in the keys that its requests share."""
        query = token_rows(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        work, num_wide = self.tensors.work, self.num_wide
        if num_wide:
            self._launch(query, kv_cache, rule, out, self.shape, work[:num_wide])
        self._launch(query, kv_cache, rule, out, self.backend.shape(1), work[num_wide:], shared)
        return out

    def _launch(
        self,
        query: Tensor,
        kv_cache: KVCache,
        rule: ScoreRule,
        out: Tensor,
        shape: ProgramShape,
        work: Tensor,
        shared: _Found | None = None,
    ) -> None:
        """Compute some entries of the list by programs of one shape."""
        num_heads, num_entries, num_kv_heads = query.shape[1], len(work), kv_cache.shape[2]
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
            *((work, out, out) if shared is None else (shared.shares, shared.partial, shared.sums)),
            rule.scale,
            rule.softcap or 0.0,
            rule.sliding_window or 0,
            query.stride(0),
            tensors.block_tables.stride(0),
            num_kv_heads,
            CAN_SPLIT=can_split,
            HAS_WINDOW=rule.sliding_window is not None,
            HAS_SINKS=rule.sinks is not None,
            HAS_LIMITS=limits is not None,
            SHARED_ROWS=0 if shared is None else shared.rows,
            **backend.constants(query, kv_cache, rule, shape),
        )


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Fulfils :class:`~.attention_backend.AttentionPlan` for a step that only decodes, with keys that are read once for
    several requests: in layers that see all tokens."""

    own: TritonPlan
    """Over the entries of the requests' own keys."""
    programs: Tensor
    """The parts of the list, as ``shared_prefix.SharedRoom`` names them."""
    members: Tensor
    requests: Tensor

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self.own.slots_of(kv_cache)

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        self.own.write_kv(key, value, kv_cache)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        # The list of own keys divides all that a window sees as well: what is shared lies before most windows, and
        # blocks there may be another request's by now.
        shared = None if rule.sliding_window is not None else self._shared(token_rows(query), kv_cache, rule)
        return self.own.attend(query, kv_cache, rule, shared)

    def _shared(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> _Found:
        """Compute what all requests find in shared keys."""
        backend, tensors, num_kv_heads = self.own.backend, self.own.tensors, kv_cache.shape[2]
        shape = backend.shared_shape
        cells = (len(self.programs), num_kv_heads, shape.rows)
        partial = torch.empty((*cells, power_of_2(kv_cache.shape[4], 16)), device=query.device)
        sums = torch.empty((*cells, 2), device=query.device)
        launch(
            attend_shared,
            (len(self.programs), num_kv_heads),
            query,
            *kv_cache.unbind(),
            partial,
            sums,
            self.programs,
            self.members,
            tensors.block_tables,
            rule.scale,
            rule.softcap or 0.0,
            query.stride(0),
            tensors.block_tables.stride(0),
            num_kv_heads,
            **backend.constants(query, kv_cache, rule, shape),
        )
        return _Found(self.requests, partial, sums, shape.rows)


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
