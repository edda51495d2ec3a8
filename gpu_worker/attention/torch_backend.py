"""Computes attention with PyTorch's operations, as fast as that is possible and as plainly as that is possible.

The first backend gathers each request's blocks, then calls SDPA. It needs no compiler. One gather per request, or per
few short requests, was fastest on CPUs: a gather of the whole batch does not fit into the caches, and padding it to the
longest request costs more than the calls that it saves. The second computes slowly and in float32; tests compare the
other backends with it.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from .attention_backend import FP8_KV, IntArray, KVCache, ScoreRule
from .cache import LocalBackend, as_bytes, elements, padded, write_slots, zero_scales


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """Return [n, num_heads, q, head_size]: queries of that shape attend over [n, num_kv_heads, s, head_size].

    The scores are float32 and lie in memory as a whole. ``mask``, which broadcasts to [n, num_heads, q, s], is True
    where a query sees a key; None: each sees all.
    """
    num_heads = query.shape[1]
    key, value = (x.repeat_interleave(num_heads // key.shape[1], dim=1).float() for x in (key, value))
    scores = query.float() @ key.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = rule.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).to(query.dtype)


_GATHER_BYTES = 1 << 20
"""How many keys and values one call may gather for several decodes; they should fit into a core's cache."""
_QUERY_ROWS = 256
"""How many queries of a prefill one call takes: it bounds the mask, and early rows skip later keys."""


class TorchBackend(LocalBackend):
    """Makes plans of :class:`Segment` (part of a prefill) and :class:`DecodeGroup` (a few decodes)."""

    name = "torch"
    reads_tails = True

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "TorchPlan":
        copies = (cu_query_lens[:-1].copy(), seq_lens.copy(), block_tables.copy())
        batch = AttentionBatch(np.diff(cu_query_lens), *copies, None if limits is None else limits.copy())
        tails = _tails(batch, self.block_size, foreign_tails)
        return TorchPlan(batch, slot_mapping, tails, self._config, self.block_size, self.device)


@dataclass(frozen=True)
class AttentionBatch:
    """Holds the step's requests in columns."""

    query_lens: IntArray
    first_rows: IntArray
    seq_lens: IntArray
    block_tables: IntArray
    limits: IntArray | None
    """[T]: the last position that each token sees; None: its own."""


@dataclass(frozen=True)
class Segment:
    """Holds consecutive queries of one request and the blocks that they see."""

    rows: slice
    cache_rows: Tensor
    """[num_kv_heads * blocks]: rows of the cache, viewed as [2, num_blocks * num_kv_heads, block_size * head_size]."""
    num_keys: int
    """How many of the gathered keys count, without the unused rest of the last block."""
    mask: Tensor | None
    """[queries, num_keys], True where a query sees a key; None: the mask is plainly causal."""


@dataclass(frozen=True)
class DecodeGroup:
    """Holds requests with one query each, padded to the number of blocks of the longest."""

    rows: Tensor
    """[n]: rows of the queries."""
    cache_rows: Tensor
    """[n * num_kv_heads * blocks]: rows of the cache, as in :class:`Segment`."""
    mask: Tensor | None
    """[n, 1, 1, keys], True where the query sees a key; None: it sees all."""


class TorchPlan:
    """Holds the segments and groups of a step; they are made when a layer first asks for their sliding window, and for
    whether tokens see later ones of their image."""

    def __init__(
        self,
        batch: AttentionBatch,
        slot_mapping: IntArray,
        tails: IntArray,
        config: ModelConfig,
        block_size: int,
        device: torch.device,
    ) -> None:
        """``tails`` [n]: the slots to zero."""
        self._batch = batch
        self._tails = tails
        self._tail_rows: Tensor | None = None
        self._block_size = block_size
        self._num_kv_heads = config.num_kv_heads
        self._cache_head_size = config.cache_head_size
        self._block_bytes = config.kv_bytes_per_token * block_size // config.num_layers
        self._device = device
        blocks, offsets = np.divmod(slot_mapping, block_size)
        self._slots = self._index(slot_mapping)
        self._places = (self._index(blocks), self._index(offsets))
        self._work: dict[tuple[int | None, bool], tuple[list[Segment], list[DecodeGroup]]] = {}

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        write_slots(key, value, kv_cache, *self._places)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        window, sees_images = kind = rule.sliding_window, rule.sees_images and self._batch.limits is not None
        if kind not in self._work:
            self._work[kind] = (self._segments(window, sees_images), self._decode_groups(window))
        segments, groups = self._work[kind]
        if len(self._tails):
            self._zero_tails(kv_cache)
        flat_cache = kv_cache.flatten(1, 2).flatten(2)
        head_size = query.shape[2]
        query = padded(query, self._cache_head_size)
        out = torch.empty_like(query)
        for segment in segments:
            out[segment.rows] = _attend_segment(query[segment.rows], kv_cache, flat_cache, segment, rule)
        for group in groups:
            out[group.rows] = _attend_group(query[group.rows], kv_cache, flat_cache, group, rule)
        return out[..., :head_size]

    def _zero_tails(self, kv_cache: KVCache) -> None:
        """Zero the slots that :func:`_tails` chose, in one layer's cache."""
        _, num_blocks, num_heads, size, head_size = kv_cache.shape
        if kv_cache.dtype == torch.int8:
            return zero_scales(kv_cache, *map(self._index, np.divmod(self._tails, size)))
        if self._tail_rows is None:
            blocks, offsets = np.divmod(self._tails, size)
            planes = np.arange(2)[:, None, None] * num_blocks + blocks
            rows = (planes * num_heads + np.arange(num_heads)[:, None]) * size + offsets
            self._tail_rows = self._index(rows.reshape(-1))
        flat = as_bytes(kv_cache) if kv_cache.dtype == FP8_KV else kv_cache
        flat.view(-1, head_size).index_fill_(0, self._tail_rows, 0)

    def _segments(self, window: int | None, sees_images: bool) -> list[Segment]:
        batch = self._batch
        segments = []
        for request in np.flatnonzero(batch.query_lens > 1).tolist():
            num_queries, seq_len = int(batch.query_lens[request]), int(batch.seq_lens[request])
            for begin in range(0, num_queries, _QUERY_ROWS):
                end = min(begin + _QUERY_ROWS, num_queries)
                context = seq_len - num_queries
                segments.append(self._segment(request, context, begin, end, window, sees_images))
        return segments

    def _segment(
        self, request: int, context: int, begin: int, end: int, window: int | None, sees_images: bool
    ) -> Segment:
        """Make the segment of queries [begin, end) of a request with ``context`` tokens before this step."""
        last, row = context + end, int(self._batch.first_rows[request])
        limits = self._batch.limits[row + begin : row + end] if sees_images and self._batch.limits is not None else None
        if limits is not None:
            last = int(limits[-1]) + 1  # no earlier token sees more
        first_block = 0 if window is None else max(context + begin - window + 1, 0) // self._block_size
        first = first_block * self._block_size
        table = self._batch.block_tables[request, first_block : -(-last // self._block_size)]
        mask = None
        # `is_causal` of PyTorch aligns the mask to the upper left corner, so it fits only queries that begin with the
        # first key.
        if limits is not None or context + begin > 0 or (window is not None and window < last):
            queries = torch.arange(context + begin, context + end, device=self._device)[:, None]
            keys = torch.arange(first, last, device=self._device)
            mask = keys <= (queries if limits is None else self._index(limits)[:, None])
            if window is not None:
                mask &= keys > queries - window
        return Segment(slice(row + begin, row + end), self._cache_rows(table[None]), last - first, mask)

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """Group requests of similar length as long as what a group gathers stays small."""
        batch = self._batch
        requests = np.flatnonzero(batch.query_lens == 1)
        unseen = np.zeros_like(batch.seq_lens) if window is None else np.maximum(batch.seq_lens - window, 0)
        first_blocks = unseen // self._block_size
        num_blocks = -(-batch.seq_lens // self._block_size) - first_blocks
        groups, members = [], list[int]()
        # By length, because every member is padded to the longest of its group.
        for request in requests[np.argsort(num_blocks[requests], kind="stable")].tolist():
            if members and (len(members) + 1) * int(num_blocks[request]) * self._block_bytes > _GATHER_BYTES:
                groups.append(self._decode_group(np.array(members), first_blocks, window))
                members = []
            members.append(request)
        if members:
            groups.append(self._decode_group(np.array(members), first_blocks, window))
        return groups

    def _decode_group(self, members: IntArray, first_blocks: IntArray, window: int | None) -> DecodeGroup:
        batch, size = self._batch, self._block_size
        seq_lens, first = batch.seq_lens[members, None], first_blocks[members, None]
        ends = -(-seq_lens // size)
        columns = first + np.arange(int((ends - first).max()))
        # Padding repeats the request's own last block. It is masked, and finite unless the request's own values are
        # not, because the slots behind its tokens were zeroed.
        tables = batch.block_tables[members[:, None], np.minimum(columns, ends - 1)]
        positions = (columns[:, :, None] * size + np.arange(size)).reshape(len(members), -1)
        seen = positions < seq_lens
        if window is not None:
            seen &= positions >= seq_lens - window
        mask = None if seen.all() else torch.from_numpy(seen)[:, None, None].to(self._device)
        return DecodeGroup(self._index(batch.first_rows[members]), self._cache_rows(tables), mask)

    def _cache_rows(self, tables: IntArray) -> Tensor:
        """Turn [n, blocks] tables into [n * num_kv_heads * blocks] rows of the cache."""
        heads = np.arange(self._num_kv_heads)[:, None]
        return self._index((tables[:, None, :] * self._num_kv_heads + heads).reshape(-1))

    def _index(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def _tails(batch: AttentionBatch, block_size: int, requests: IntArray | None) -> IntArray:
    """Return the slots [n] behind the tokens of these requests, or of all, in the last block of each."""
    seq_lens, tables = batch.seq_lens, batch.block_tables
    chosen = np.arange(len(seq_lens)) if requests is None else requests
    if not len(chosen):
        return chosen
    last = seq_lens[chosen] - 1
    first_slots = tables[chosen, last // block_size].astype(np.int64) * block_size
    offsets = np.arange(block_size)
    is_behind = offsets > (last % block_size)[:, None]
    slots: IntArray = (first_slots[:, None] + offsets)[is_behind]
    return slots


def _gather(
    kv_cache: KVCache, flat_cache: Tensor, cache_rows: Tensor, num_requests: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather keys and values, each [n, num_kv_heads, keys, head_size] of ``dtype``, in one copy of whole blocks."""
    _, _, num_kv_heads, size, row_size = kv_cache.shape
    if flat_cache.dtype == FP8_KV:
        chosen = as_bytes(flat_cache).index_select(1, cache_rows).view(FP8_KV)
    else:
        chosen = flat_cache.index_select(1, cache_rows)
    blocks = elements(chosen.view(2, -1, size, row_size)).to(dtype)
    gathered = blocks.view(2, num_requests, num_kv_heads, -1, blocks.shape[-1])
    return gathered[0], gathered[1]


def _attend_segment(query: Tensor, kv_cache: KVCache, flat_cache: Tensor, segment: Segment, rule: ScoreRule) -> Tensor:
    key, value = _gather(kv_cache, flat_cache, segment.cache_rows, 1, query.dtype)
    query, key, value = query.transpose(0, 1)[None], key[:, :, : segment.num_keys], value[:, :, : segment.num_keys]
    if not rule.is_plain:
        mask, size = segment.mask, segment.num_keys
        if mask is None:  # it is plainly causal
            mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
        return attend_dense(query, key, value, mask, rule)[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        scale=rule.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _attend_group(query: Tensor, kv_cache: KVCache, flat_cache: Tensor, group: DecodeGroup, rule: ScoreRule) -> Tensor:
    """Place the query heads of one KV head where a prefill has its queries, so that no key is repeated for them."""
    num_requests, num_heads, head_size = query.shape
    key, value = _gather(kv_cache, flat_cache, group.cache_rows, num_requests, query.dtype)
    if not rule.is_plain:
        return attend_dense(query[:, :, None], key, value, group.mask, rule)[:, :, 0]
    # With one query each, heads in place of queries make a matrix product of what would be products with a vector.
    grouped = query.view(num_requests, key.shape[1], -1, head_size)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask, scale=rule.scale)
    return out.reshape(num_requests, num_heads, head_size)


class ReferenceBackend(LocalBackend):
    """Computes one request and one softmax at a time."""

    name = "reference"

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "ReferencePlan":
        slots = torch.from_numpy(slot_mapping.astype(np.int64)).to(self.device)
        lists = (cu_query_lens.tolist(), seq_lens.tolist(), block_tables.tolist())
        seen = None if limits is None else torch.from_numpy(limits.astype(np.int64)).to(self.device)
        return ReferencePlan(*lists, slots, self.block_size, seen)


@dataclass(frozen=True)
class ReferencePlan:
    """Holds the batch unchanged, in plain lists."""

    cu_query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    slots: Tensor
    block_size: int
    limits: Tensor | None
    """[T]: the last position that each token sees; None: its own."""

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
            limits = self.limits[rows] if rule.sees_images and self.limits is not None else None
            out[rows] = _attend_one(query[rows].float(), key, value, rule, first, limits).to(out.dtype)
        return out


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, first: int, limits: Tensor | None
) -> Tensor:
    """Attend with [q, heads, size] over [kv_heads, s, size], whose first position is ``first``; the last query is the
    last position. ``limits`` [q]: the last position that each query sees; None: its own."""
    (num_queries, num_heads, _), (num_kv_heads, num_keys, _) = query.shape, key.shape
    seq_len = first + num_keys
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (key, value))
    scores = torch.einsum("qhd,hsd->hqs", query, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    positions = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    others = torch.arange(first, seq_len, device=query.device)
    hidden = others > (positions if limits is None else limits[:, None])
    if rule.sliding_window is not None:
        hidden = hidden | (others <= positions - rule.sliding_window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    return torch.einsum("hqs,hsd->qhd", scores.softmax(-1)[:, :, :num_keys], value)
