"""Spreads the KV of every sequence over ranks: context parallelism, as vLLM's decode context parallelism divides it.

The ranks of a group compute the layers together (tensor parallel), but each keeps all KV heads of some tokens instead
of some heads of all tokens: rank r of n has the r-th n-th of the tokens of every block. For attention the ranks
exchange their heads, each attends to its tokens with all queries, and the parts are merged by their log-sum-exp, as
split-KV decoding merges the parts of one sequence (Dao et al., 2023).

And it divides the tokens of a step with a long prompt over ranks of several copies of the model: prefill context
parallelism. A rank computes its tokens in all layers. Before it attends in a layer, the ranks exchange the keys and
values that they wrote, so that each has the KV of all tokens. Steps without a long prompt are computed by every rank
for itself: that takes the time of one rank, and no exchange. A prompt is cut into twice as many pieces as there are
ranks, and each rank gets one from the front and one from the back: later tokens attend to more, and so all ranks have
as much to do.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from ..checkpoint.model_config import ModelConfig
from ..parallel.group import RankGroup
from .attention_backend import FP8_KV, AttentionBackend, IntArray, KVCache, ScoreRule
from .cache import allocate_kv_caches, as_bytes, elements, numbers_of, scales_of, write_slots


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


LEAST_TOKENS = 128
"""Tokens that a rank must have to compute in a step that is divided: an exchange for each layer costs as much as
computing a few tokens."""

ToDevice = Callable[[npt.NDArray[Any]], Tensor]


class RowRun(NamedTuple):
    """Holds tokens of one request that a rank computes: rows [begin, end) of the step."""

    request: int
    begin: int
    end: int


def divide(cu_query_lens: IntArray, seq_lens: IntArray, block_size: int, size: int) -> list[list[RowRun]] | None:
    """Return which rows of a step each of ``size`` ranks computes, in order; None: none of its prompts is long enough
    to be divided. The arrays are those of a plan."""
    starts, lengths = cu_query_lens[:-1].tolist(), np.diff(cu_query_lens).tolist()
    fewest = size * max(LEAST_TOKENS, 2 * block_size)
    if max(lengths) < fewest:
        return None
    shares: list[list[RowRun]] = [[] for _ in range(size)]
    whole: list[RowRun] = []
    for request, (start, length, end) in enumerate(zip(starts, lengths, seq_lens.tolist(), strict=True)):
        if length < fewest:
            whole.append(RowRun(request, start, start + length))
            continue
        # At the ends of blocks: a backend may zero what lies behind the last token of a run in its block.
        first, last = (end - length) // block_size, -(-end // block_size)
        cuts = [(first + (last - first) * piece // (2 * size)) * block_size for piece in range(2 * size + 1)]
        rows = [start + min(max(cut - (end - length), 0), length) for cut in cuts]
        for piece in range(2 * size):
            shares[min(piece, 2 * size - 1 - piece)].append(RowRun(request, rows[piece], rows[piece + 1]))
    for run in whole:
        min(shares, key=lambda share: sum(each.end - each.begin for each in share)).append(run)
    return [sorted(share, key=lambda run: run.begin) for share in shares]


class _Exchange:
    """Exchanges rows of a step between the ranks that computed them."""

    def __init__(self, group: RankGroup, shares: Sequence[Sequence[RowRun]], to_device: ToDevice) -> None:
        rows = [np.concatenate([np.arange(run.begin, run.end) for run in share]) for share in shares]
        self.own: npt.NDArray[np.int64] = rows[group.rank]
        self.order = to_device(np.concatenate(rows))
        """[T]: the rows of the step, in the order of the ranks that compute them."""
        self._group = group
        self._most = max(map(len, rows))
        self._places = to_device(
            np.concatenate([rank * self._most + np.arange(len(each)) for rank, each in enumerate(rows)])
        )

    def all_rows(self, own: Tensor) -> Tensor:
        """Return the rows [T, ...] of all ranks, as in :attr:`order`; ``own``: those of this rank, [own, ...]."""
        # As bytes: not every backend of torch.distributed sends every dtype.
        flat = own.reshape(len(own), -1).contiguous().view(torch.uint8)
        padded = flat.new_zeros(self._most, flat.shape[1])
        padded[: len(flat)] = flat
        gathered = self._group.all_gather(padded).flatten(0, 1)[self._places]
        return gathered.view(own.dtype).view(-1, *own.shape[1:])

    def in_order(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the step."""
        rows = self.all_rows(own)
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


class _DividedPlan:
    """Fulfils :class:`.attention_backend.AttentionPlan`, and what models with compressed vectors ask for."""

    def __init__(self, own: Any, all_rows: Any, exchange: _Exchange) -> None:
        """``own``: the plan of this rank's tokens. ``all_rows``: that of the step, with all slots."""
        self._own = own
        self._all_rows = all_rows
        self._exchange = exchange
        self._complete: set[int] = set()
        """By ``id``, caches that have the KV of all tokens: layers of several groups share one tensor."""

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        slots: Tensor = self._own.slots_of(kv_cache)
        return slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        self._own.write_kv(key, value, kv_cache)

    def write_latents(self, rows: Tensor, kv_cache: KVCache) -> None:
        self._own.write_latents(rows, kv_cache)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        self._complete_cache(kv_cache)
        attended: Tensor = self._own.attend(query, kv_cache, rule)
        return attended

    def attend_latents(self, plain: Tensor, turned: Tensor, kv_cache: KVCache, projection: Any) -> Tensor:
        self._complete_cache(kv_cache)
        attended: Tensor = self._own.attend_latents(plain, turned, kv_cache, projection)
        return attended

    def _complete_cache(self, kv_cache: KVCache) -> None:
        if id(kv_cache) in self._complete:  # of a layer that attends to the KV of an earlier one
            return
        self._complete.add(id(kv_cache))
        size = kv_cache.shape[3]
        own, slots = self._own.slots_of(kv_cache), self._all_rows.slots_of(kv_cache)[self._exchange.order]
        for part in _parts(kv_cache):
            rows = self._exchange.all_rows(part[:, own // size, :, own % size])
            part[:, slots // size, :, slots % size] = rows


def _parts(kv_cache: KVCache) -> list[Tensor]:
    """Return views [planes, num_blocks, num_kv_heads, block_size, ...] of a cache, whose rows can be copied."""
    if kv_cache.dtype == torch.int8:
        return [numbers_of(kv_cache), scales_of(kv_cache)]
    return [as_bytes(kv_cache) if kv_cache.dtype == FP8_KV else kv_cache]


class PrefillContext:
    """Computes steps together with the other ranks.

    Attributes:
        num_steps: How many were divided.
        num_tokens: How many tokens this rank computed in them.
    """

    def __init__(self, group: RankGroup, block_size: int, to_device: ToDevice) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self._group = group
        self._block_size = block_size
        self._to_device = to_device

    def forward(self, model: Any, backend: AttentionBackend, kv_caches: list[KVCache], inputs: Any) -> Tensor | None:
        """Return the last hidden states [T, hidden_size] of a step; None: each rank is to compute all of it."""
        if inputs.drafts or inputs.limits is not None or inputs.states is not None or inputs.cross is not None:
            return None
        shares = divide(inputs.cu_query_lens, inputs.seq_lens, self._block_size, self._group.size)
        if shares is None:
            return None
        exchange = _Exchange(self._group, shares, self._to_device)
        plan, own = self._plan(backend, inputs, shares[self._group.rank], exchange), exchange.own
        turned = inputs.positions if inputs.rope is None else inputs.rope
        hidden: Tensor = model.forward(
            self._to_device(inputs.token_ids[own]),
            self._to_device(np.ascontiguousarray(turned[..., own])),
            kv_caches,
            plan,
            self._embeds(inputs, shares[self._group.rank]),
        )
        self.num_steps += 1
        self.num_tokens += len(own)
        if getattr(model, "kept_states", None) is not None:  # what an EAGLE-3 head reads, on the last stage
            model.kept_states = exchange.in_order(model.kept_states)
        return exchange.in_order(hidden)

    def _plan(
        self, backend: AttentionBackend, inputs: Any, share: Sequence[RowRun], exchange: _Exchange
    ) -> _DividedPlan:
        requests = [run.request for run in share]
        starts = inputs.cu_query_lens
        # A run sees what lies before its last token, as a request that is no longer.
        behind = np.array([starts[run.request + 1] - run.end for run in share], dtype=np.int32)
        lengths = np.array([run.end - run.begin for run in share])
        own = backend.plan(
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            inputs.seq_lens[requests] - behind,
            np.ascontiguousarray(inputs.block_tables[requests]),
            np.ascontiguousarray(inputs.slot_mapping[..., exchange.own]),
        )
        nothing: IntArray = np.empty(0, dtype=np.int64)
        tables = inputs.block_tables
        step = backend.plan(inputs.cu_query_lens, inputs.seq_lens, tables, inputs.slot_mapping, nothing)
        return _DividedPlan(own, step, exchange)

    def _embeds(self, inputs: Any, share: Sequence[RowRun]) -> list[tuple[int, Tensor]]:
        found, begin = [], 0
        for run in share:
            for start, rows in inputs.embeds:
                first, last = max(start, run.begin), min(start + len(rows), run.end)
                if first < last:
                    part = self._to_device(rows[first - start : last - start].copy())
                    found.append((begin + first - run.begin, part))
            begin += run.end - run.begin
        return found
