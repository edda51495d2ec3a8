"""Computes attention over a cache of compressed vectors, of which all heads of a token share one.

A head's keys and values are products with the compressed vectors. Either they are computed (expanded), as a prompt
wants it, or the query is multiplied by the matrix of the keys instead and the result by that of the values (absorbed),
so that a decode reads each compressed vector once for all heads.
"""

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.local_config import kernel_lack
from ..checkpoint.model_config import LatentSwitches, ModelConfig
from ..checkpoint.weights import LowRankChange
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import LatentArgs, load_latent
from ..kernels.threads import kernel_threads
from .attention_backend import TOKENWISE, IntArray, KVCache
from .cache import LocalBackend

PerHead: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies [T, heads, in] by a matrix of each head. Returns [T, heads, out]."""


def per_head(matrices: Tensor) -> PerHead:
    """Return the product with ``matrices`` [heads, in, out], with PyTorch."""
    return lambda rows: torch.bmm(rows.transpose(0, 1).contiguous(), matrices).transpose(0, 1)


class LatentProjection:
    """Holds one layer's matrix from compressed vectors to the keys and values of each head."""

    def __init__(
        self,
        weight: Tensor,
        latent: LatentSwitches,
        scale: float,
        multiplier: Callable[[Tensor], PerHead] = per_head,
    ) -> None:
        """``weight`` [num_heads * (key_size + value_size), rank]; ``scale``: the factor on query times key;
        ``multiplier``: as :func:`per_head`."""
        self.latent = latent
        self.scale = scale
        heads = weight.view(-1, latent.key_size + latent.value_size, latent.rank)
        # Apart: PyTorch multiplies by a view of both in a tenth of the speed (128 heads: 10.5 ms instead of 2.2).
        self._keys, self._values = heads[:, : latent.key_size].contiguous(), heads[:, latent.key_size :].contiguous()
        self._absorb, self._expand_values = multiplier(self._keys), multiplier(self._values.transpose(1, 2))

    @property
    def num_heads(self) -> int:
        return len(self._keys)

    def absorb(self, query: Tensor) -> Tensor:
        """Turn [T, num_heads, key_size] queries into queries of compressed vectors, [T, num_heads, rank]."""
        return self._absorb(query)

    def values(self, mixed: Tensor) -> Tensor:
        """Turn [T, num_heads, rank] weighted sums of compressed vectors into [T, num_heads, value_size] of values."""
        return self._expand_values(mixed)

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return the keys [heads, s, query_size] and values [heads, s, value_size] of compressed vectors with their
        rotated keys, [s, rank + rope_size]."""
        vectors, rotated = latents[:, : self.latent.rank], latents[:, self.latent.rank :]
        keys, values = (
            F.linear(vectors, matrices.flatten(0, 1)).view(len(vectors), *matrices.shape[:2]).transpose(0, 1)
            for matrices in (self._keys[heads], self._values[heads])
        )
        return torch.cat((keys, rotated.expand(len(keys), -1, -1)), dim=2), values

    def expands(self, num_queries: int, num_keys: int) -> bool:
        """Return whether the last ``num_queries`` of ``num_keys`` tokens take fewer products with expanded keys."""
        latent, pairs = self.latent, num_queries * (num_keys - num_queries // 2)
        matrix = (latent.key_size + latent.value_size) * latent.rank
        absorbed = num_queries * matrix + pairs * (2 * latent.rank + latent.rope_size)
        return num_keys * matrix + pairs * (latent.query_size + latent.value_size) < absorbed


class ChangedProjection(LatentProjection):
    """Is a projection with the change of an adapter, whose matrices are never multiplied out."""

    def __init__(self, base: LatentProjection, change: LowRankChange) -> None:
        self.latent, self.scale = base.latent, base.scale
        latent = base.latent
        self._base = base
        if change.weight is not None:
            self._base = LatentProjection(change.weight, latent, base.scale)
        self._down, size = change.down, latent.key_size + latent.value_size
        up = change.up.t().reshape(base.num_heads, size, len(change.up))
        self._up_keys, self._up_values = up[:, : latent.key_size], up[:, latent.key_size :]
        factors = torch.ones(base.num_heads, size, device=up.device) if change.factors is None else change.factors
        factors = factors.view(base.num_heads, size).to(up.dtype)
        self._key_factors, self._value_factors = factors[:, : latent.key_size], factors[:, latent.key_size :]

    @property
    def num_heads(self) -> int:
        return self._base.num_heads

    def absorb(self, query: Tensor) -> Tensor:
        query = query * self._key_factors
        return self._base.absorb(query) + torch.einsum("thk,hkr->thr", query, self._up_keys) @ self._down.t()

    def values(self, mixed: Tensor) -> Tensor:
        values = self._base.values(mixed) + torch.einsum("thr,hvr->thv", mixed @ self._down, self._up_values)
        return values * self._value_factors

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        keys, values = self._base.expand(latents, heads)
        small, size = latents[:, : self.latent.rank] @ self._down, self.latent.key_size
        keys[..., :size] += torch.einsum("sr,hkr->hsk", small, self._up_keys[heads])
        keys[..., :size] *= self._key_factors[heads, None]
        values = values + torch.einsum("sr,hvr->hsv", small, self._up_values[heads])
        return keys, values * self._value_factors[heads, None]


class LatentBackend(LocalBackend):
    """Makes plans that compute with PyTorch's operations, on every device."""

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device, name: str = "torch") -> None:
        """``name``: ``reference`` absorbs every query, in float32."""
        super().__init__(config, block_size, device)
        self.name = name
        # Beside states, which have the same bits wherever a prompt is cut, attention has one form, too.
        self.expands = name not in ("reference", TOKENWISE) and config.mixer is None

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "LatentPlan":
        return self.plan_kind(self, cu_query_lens, seq_lens, block_tables, slot_mapping)

    @property
    def plan_kind(self) -> "type[LatentPlan]":
        """Return the class of the plans."""
        return LatentPlan


@dataclass(frozen=True, slots=True)
class LatentSpan:
    """Holds the rows of one request in a step."""

    request: int
    rows: slice
    blocks: Tensor
    seq_len: int

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)


_EXPANDED_ELEMENTS = 1 << 24
"""About how many elements of keys and values are expanded at once: so many heads are computed together."""
_QUERY_ROWS = 256
"""Queries of a prompt that one call takes: it bounds the mask, and early rows skip later keys."""


class LatentPlan:
    """Fulfils :class:`~.attention_backend.AttentionPlan` for compressed vectors, which have calls of their own."""

    def __init__(
        self,
        backend: LatentBackend,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
    ) -> None:
        self._device = backend.device
        self._expands = backend.expands
        self._work: tuple[list[LatentSpan], list[LatentSpan], Tensor] | None = None
        self._slots = torch.from_numpy(slot_mapping.astype(np.int64)).to(self._device)
        starts, lengths = cu_query_lens.tolist(), seq_lens.tolist()
        tables = torch.from_numpy(block_tables.astype(np.int64)).to(self._device)
        self.spans: list[LatentSpan] = [
            LatentSpan(
                request, slice(starts[request], starts[request + 1]), table[: -(-length // backend.block_size)], length
            )
            for request, (table, length) in enumerate(zip(tables, lengths, strict=True))
        ]

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        raise AssertionError("compressed vectors are written by write_latents")

    def attend(self, query: Tensor, kv_cache: KVCache, rule: object) -> Tensor:
        raise AssertionError("compressed vectors are read by attend_latents")

    def write_latents(self, latents: Tensor, kv_cache: KVCache) -> None:
        """Store [T, rank + rope_size] compressed vectors and rotated keys in the slots of their tokens."""
        kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, self._slots, latents)

    def attend_latents(self, query: Tensor, rotated: Tensor, kv_cache: KVCache, projection: LatentProjection) -> Tensor:
        """Compute causal attention of queries, [T, num_heads, key_size] and, rotated, [T, num_heads, rope_size], over
        the cached tokens of their requests. Returns [T, num_heads * value_size]."""
        if self._work is None:
            self._work = self._divide(projection)
        expanded, absorbed, rows = self._work
        if not expanded:
            return self._absorbed(query, rotated, absorbed, kv_cache, projection).flatten(1)
        out = query.new_empty(*query.shape[:2], projection.latent.value_size)
        for span in expanded:
            queries = torch.cat((query[span.rows], rotated[span.rows]), dim=2)
            out[span.rows] = self._expanded(queries, span, kv_cache, projection)
        if absorbed:
            out[rows] = self._absorbed(query[rows], rotated[rows], absorbed, kv_cache, projection)
        return out.flatten(1)

    def _divide(self, projection: LatentProjection) -> tuple[list[LatentSpan], list[LatentSpan], Tensor]:
        """Return the requests whose keys are expanded, the others, and the rows of the others. All layers share it."""
        parts: tuple[list[LatentSpan], list[LatentSpan]] = ([], [])
        for span in self.spans:
            expands = self._expands and projection.expands(span.count, span.seq_len)
            parts[0 if expands else 1].append(span)
        rows = [torch.arange(span.rows.start, span.rows.stop) for span in parts[1]]
        return *parts, torch.cat(rows or [torch.zeros(0, dtype=torch.int64)]).to(self._device)

    def _latents_of(self, span: LatentSpan, kv_cache: KVCache) -> Tensor:
        """Return what the cache holds of a request's tokens, [seq_len, rank + rope_size]."""
        return kv_cache[0, :, 0].index_select(0, span.blocks).flatten(0, 1)[: span.seq_len]

    def _absorbed(
        self, query: Tensor, rotated: Tensor, spans: list[LatentSpan], kv_cache: KVCache, projection: LatentProjection
    ) -> Tensor:
        """Compute the rows of these requests, one after the other, without expanding keys or values."""
        queries = torch.cat((projection.absorb(query), rotated), dim=2)
        return projection.values(self.attend_absorbed(queries, spans, kv_cache, projection))

    def attend_absorbed(
        self, queries: Tensor, spans: list[LatentSpan], kv_cache: KVCache, projection: LatentProjection
    ) -> Tensor:
        """Return for queries of compressed vectors, [T, num_heads, rank + rope_size], their weighted sums, [T,
        num_heads, rank]."""
        rank, scale = projection.latent.rank, projection.scale
        parts, begin = [], 0
        for span in spans:
            latents = self._latents_of(span, kv_cache).float()
            scores = queries[begin : begin + span.count].float() @ latents.t() * scale
            if span.count > 1:
                scores = scores.masked_fill(~self._seen(span, 0, span.count)[:, None], -torch.inf)
            parts.append((scores.softmax(-1) @ latents[:, :rank]).to(queries.dtype))
            begin += span.count
        return torch.cat(parts)

    def _seen(self, span: LatentSpan, begin: int, end: int) -> Tensor:
        """Return which tokens up to the last of them queries [begin, end) of a request see."""
        context = span.seq_len - span.count
        queries = torch.arange(context + begin, context + end, device=self._device)[:, None]
        return torch.arange(context + end, device=self._device) <= queries

    def _expanded(self, query: Tensor, span: LatentSpan, kv_cache: KVCache, projection: LatentProjection) -> Tensor:
        """Compute one request's rows, [n, num_heads, query_size], with the keys and values of a few heads at a time."""
        latent, latents = projection.latent, self._latents_of(span, kv_cache)
        each = span.seq_len * (latent.query_size + latent.value_size)
        step = max(1, _EXPANDED_ELEMENTS // each)
        size = max(latent.query_size, latent.value_size)
        parts = []
        for first in range(0, projection.num_heads, step):
            heads = slice(first, first + step)
            keys, values = projection.expand(latents, heads)
            # Of one size, as the fast kernels of PyTorch want it; what is added is zero.
            chosen, keys, values = (
                F.pad(x, (0, size - x.shape[2])) for x in (query[:, heads].transpose(0, 1), keys, values)
            )
            parts.append(self._attend_expanded(chosen, keys, values, span, projection.scale)[..., : latent.value_size])
        return torch.cat(parts).transpose(0, 1)

    def _attend_expanded(self, query: Tensor, keys: Tensor, values: Tensor, span: LatentSpan, scale: float) -> Tensor:
        """Return [heads, n, size]: causal attention of a request's n queries over its [heads, seq_len, size]."""
        parts = []
        for begin in range(0, span.count, _QUERY_ROWS):
            end = min(begin + _QUERY_ROWS, span.count)
            last = span.seq_len - span.count + end
            is_plain = last == end - begin  # the mask of PyTorch begins with the first key
            part = F.scaled_dot_product_attention(
                query[None, :, begin:end],
                keys[None, :, :last],
                values[None, :, :last],
                attn_mask=None if is_plain else self._seen(span, begin, end),
                is_causal=is_plain,
                scale=scale,
            )
            parts.append(part[0])
        return torch.cat(parts, dim=1)


class LatentCPUBackend(LatentBackend):
    """Makes plans that absorb queries with the C++ kernel.

    Raises :class:`KernelsUnavailable` without a compiler, and for shapes that the kernel does not support.
    """

    def __init__(
        self, config: ModelConfig, block_size: int, device: torch.device, march: str = "native", name: str = "cpu"
    ) -> None:
        """``name``: ``tokenwise`` absorbs every query."""
        super().__init__(config, block_size, device, name)
        latent = config.latent
        assert latent is not None
        if lack := kernel_lack(config, block_size):
            raise KernelsUnavailable(lack)
        self.kernels = load_latent(latent.rank, latent.rope_size, march)

    @property
    def plan_kind(self) -> "type[LatentPlan]":
        return LatentCPUPlan


class LatentCPUPlan(LatentPlan):
    """Holds the kernel's arguments too, a few of which each layer changes."""

    def __init__(
        self,
        backend: LatentCPUBackend,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
    ) -> None:
        super().__init__(backend, cu_query_lens, seq_lens, block_tables, slot_mapping)
        self._kernels = backend.kernels
        self._tables = np.array(block_tables, dtype=np.int32, order="C")
        self._block_size = backend.block_size
        self._args: LatentArgs | None = None

    def attend_absorbed(
        self, queries: Tensor, spans: list[LatentSpan], kv_cache: KVCache, projection: LatentProjection
    ) -> Tensor:
        out = queries.new_empty(*queries.shape[:2], projection.latent.rank)
        args = self._args = self._args or self._make_args(queries, spans)
        args.query, args.cache, args.out = queries.data_ptr(), kv_cache.data_ptr(), out.data_ptr()
        args.scale = projection.scale
        self._kernels.attend_latents(byref(args))
        return out

    def _make_args(self, queries: Tensor, spans: list[LatentSpan]) -> LatentArgs:
        counts = [span.count for span in spans]
        # A row sees the positions up to its own.
        lengths = [np.arange(span.seq_len - span.count, span.seq_len) + 1 for span in spans]
        self._lengths = np.concatenate(lengths).astype(np.int32)
        self._requests = np.repeat([span.request for span in spans], counts).astype(np.int32)
        return LatentArgs(
            block_tables=self._tables.ctypes.data,
            requests=self._requests.ctypes.data,
            lengths=self._lengths.ctypes.data,
            num_rows=len(self._lengths),
            num_heads=queries.shape[1],
            block_size=self._block_size,
            table_stride=self._tables.shape[1],
            is_bf16=queries.dtype == torch.bfloat16,
            num_threads=kernel_threads(),
        )
