"""Computes attention of models whose layers differ in the shape of their keys and values (Gemma 4), or of which some
see their own chunk of positions only (Llama 4).

Both are other views of the same blocks, so that every backend computes them. A layer with smaller rows reads each block
as several, of which it uses the first. To a layer with chunks each chunk of a request is a request of its own: it has
the blocks from its begin on, and the queries that lie in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from ..checkpoint.local_config import check_chunks, check_kv_dtype
from ..checkpoint.model_config import KVShape, ModelConfig
from .attention_backend import AttentionBackend, AttentionPlan, IntArray, KVCache, ScoreRule


class _Kind(NamedTuple):
    """Says what layers have in common that one plan serves."""

    shape: KVShape
    chunk: int | None


@dataclass(frozen=True)
class _Step:
    """Holds the arrays of a step, as :meth:`.attention_backend.AttentionBackend.plan` gets them."""

    query_starts: IntArray
    seq_lens: IntArray
    tables: IntArray
    slots: IntArray
    foreign_tails: IntArray | None
    limits: IntArray | None
    block_size: int

    def scaled(self, ratio: int) -> "_Step":
        """Return the step over blocks of which ``ratio`` lie in each block here."""
        blocks, offsets = np.divmod(self.slots, self.block_size)
        slots = blocks * (ratio * self.block_size) + offsets
        return replace(self, tables=self.tables * ratio, slots=slots)

    def chunked(self, chunk: int) -> "_Step":
        """Return the step with a request for each chunk of ``chunk`` positions in which a request has queries."""
        ends = self.seq_lens.astype(np.int64)
        begins = ends - np.diff(self.query_starts)
        firsts = begins // chunk
        counts = (ends - 1) // chunk - firsts + 1
        requests = np.repeat(np.arange(len(ends)), counts)
        earlier = np.cumsum(counts) - counts
        origins = (np.arange(len(requests)) - earlier[requests] + firsts[requests]) * chunk
        stops = np.minimum(ends[requests], origins + chunk)
        lengths = stops - np.maximum(begins[requests], origins)
        last = self.tables.shape[1] - 1
        columns = (origins // self.block_size)[:, None] + np.arange(min(last + 1, chunk // self.block_size))
        return replace(
            self,
            query_starts=np.concatenate(([0], np.cumsum(lengths))),
            seq_lens=stops - origins,
            tables=self.tables[requests[:, None], np.minimum(columns, last)],
            foreign_tails=None,
            limits=None,  # no layer with chunks shows a token later ones
        )


class VariedBackend:
    """Fulfils :class:`~.attention_backend.AttentionBackend` with a backend for each kind of layer."""

    def __init__(self, config: ModelConfig, block_size: int, make: Callable[[ModelConfig], AttentionBackend]) -> None:
        """``make`` returns the backend of a model whose layers are all alike. Raises ``ValueError`` if chunks are no
        whole blocks."""
        check_chunks(config, block_size)
        check_kv_dtype(config, config.kv_cache_dtype)
        self._config = replace(config, kv_shapes=(), attention_chunks=())
        self._shapes = config.kv_shapes
        self._block_size = block_size
        self._make = make
        self._whole = make(self._config)
        self._parts = {_Kind(KVShape(config.num_kv_heads, config.head_size), None): self._whole}

    @property
    def name(self) -> str:
        return self._whole.name

    @property
    def reads_tails(self) -> bool:
        return self._whole.reads_tails

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        caches = self._whole.allocate(num_blocks, memory)
        return [shaped(cache, shape) for cache, shape in zip_longest(caches, self._shapes[: len(caches)])]

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "VariedPlan":
        arrays = (cu_query_lens.copy(), seq_lens.copy(), block_tables.copy(), slot_mapping.copy())
        limits = None if limits is None else limits.copy()
        return VariedPlan(self, _Step(*arrays, foreign_tails, limits, self._block_size))

    def kind_of(self, kv_cache: KVCache, chunk: int | None) -> _Kind:
        """Return the kind of the layer with this cache."""
        config = self._config
        whole = KVShape(config.num_kv_heads, config.head_size)
        return _Kind(KVShape(kv_cache.shape[2], kv_cache.shape[4]) if self._shapes else whole, chunk)

    def plan_of(self, kind: _Kind, step: _Step) -> AttentionPlan:
        """Return the plan of a step for the layers of one kind."""
        heads, size = kind.shape
        if kind not in self._parts:
            # Backends keep what they found about the last step, so each kind has one of its own.
            self._parts[kind] = self._make(replace(self._config, num_kv_heads=heads, head_size=size))
        ratio = self._config.num_kv_heads * self._config.head_size // (heads * size)
        if ratio > 1:
            step = step.scaled(ratio)
        if kind.chunk is not None:
            step = step.chunked(kind.chunk)
        arrays = (step.query_starts, step.seq_lens, step.tables, step.slots)
        return self._parts[kind].plan(*arrays, step.foreign_tails, step.limits)


class VariedPlan:
    """Holds the plans of a step, which are made when a layer of their kind first asks for them."""

    def __init__(self, backend: VariedBackend, step: _Step) -> None:
        self._backend = backend
        self._step = step
        self._plans: dict[_Kind, AttentionPlan] = {}

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._plan_of(kv_cache).slots_of(kv_cache)

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        self._plan_of(kv_cache).write_kv(key, value, kv_cache)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        return self._plan_of(kv_cache, rule.chunk).attend(query, kv_cache, rule)

    def _plan_of(self, kv_cache: KVCache, chunk: int | None = None) -> AttentionPlan:
        kind = self._backend.kind_of(kv_cache, chunk)
        if kind not in self._plans:
            self._plans[kind] = self._backend.plan_of(kind, self._step)
        return self._plans[kind]


def shaped(kv_cache: KVCache, shape: KVShape | None) -> KVCache:
    """Return another view of a layer's cache, with the heads of ``shape``; None: with its own."""
    if shape is None:
        return kv_cache.view(kv_cache.shape)
    planes, _, _, block_size, _ = kv_cache.shape
    return kv_cache.view(planes, -1, shape.num_heads, block_size, shape.head_size)
