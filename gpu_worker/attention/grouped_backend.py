"""Describes how the layers of a model lie in the KV pool, in one table of blocks or in groups that share tensors, and
computes attention of a model whose layers are partitioned into groups with block tables of their own."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from tokenloom.engine_core.data.kv_groups import KVGroup, describe_groups, layers_per_group, part_suffix
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from ..checkpoint.model_config import KVShape, ModelConfig
from .attention_backend import AttentionBackend, AttentionPlan, IntArray, KVCache, ScoreRule
from .cache import kv_layout
from .cpu_backend import CPUBackend
from .shared_prefix import SharedPrefixFinder
from .varied_backend import shaped


class GroupedBackend:
    """Fulfils :class:`~.attention_backend.AttentionBackend` with one backend for each group.

    A plan gets the block table and the slots of all groups, as :class:`~..batch.batch_arrays.BlockTable` holds them.
    Backends do not read blocks that lie before a request's window: they may be another request's by now.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        make_backend: Callable[[], AttentionBackend],
        sources: Sequence[int] = (),
        shapes: Sequence[KVShape] = (),
    ) -> None:
        """``make_backend``: makes a backend for as many layers as a group has. ``sources``: as
        ``ModelConfig.kv_sources``; a layer that is in no group gets the cache of its source. ``shapes``: as
        ``ModelConfig.kv_shapes``."""
        self._groups = list(groups)
        self._shapes = list(shapes)
        self._sources = list(sources)
        self.parts = [make_backend() for _ in groups]
        """The backend of each group."""
        for group, backend in zip(groups, self.parts, strict=True):
            if group.window is not None and isinstance(backend, CPUBackend):
                backend.prefixes = SharedPrefixFinder(block_size, sys.maxsize)  # windows share none
        self._group_of: dict[int, int] = {}
        """By ``id`` of a layer's cache, because layers of several groups share one tensor. Caches are made at start-up
        and after sleep, so the entries are few."""

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def reads_tails(self) -> bool:
        return self.parts[0].reads_tails

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        """Allocate a zeroed cache for each layer of a group. Returns one view for each layer of the model."""
        tensors = self.parts[0].allocate(num_blocks, memory)
        caches: dict[int, KVCache] = {}
        for index, group in enumerate(self._groups):
            for tensor, layer in zip(tensors, group.layers, strict=False):
                caches[layer] = shaped(tensor, self._shapes[layer] if self._shapes else None)
                self._group_of[id(caches[layer])] = index
        sources = self._sources or range(len(caches))
        return [caches[source] for source in sources]

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "GroupedPlan":
        plans = [
            backend.plan(
                cu_query_lens,
                seq_lens,
                np.ascontiguousarray(block_tables[:, index :: len(self._groups)]),
                slot_mapping[index],
                foreign_tails,
                limits,
            )
            for index, backend in enumerate(self.parts)
        ]
        return self.join(plans)

    def join(self, plans: list[AttentionPlan]) -> "GroupedPlan":
        """Return a step's plan of all layers; ``plans``: that of each group."""
        return GroupedPlan(plans, self._group_of)


class FirstGroupBackend:
    """Fulfils :class:`~.attention_backend.AttentionBackend` for layers beside those of groups, such as a draft model's,
    whose KV lies in the blocks of the first group: that of full attention, which keeps every token."""

    reads_tails = False

    def __init__(self, backend: AttentionBackend, num_groups: int) -> None:
        self._backend = backend
        self._num_groups = num_groups
        self.name = backend.name

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        return self._backend.allocate(num_blocks, memory)

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> AttentionPlan:
        tables = np.ascontiguousarray(block_tables[:, :: self._num_groups])
        return self._backend.plan(cu_query_lens, seq_lens, tables, slot_mapping[0], foreign_tails, limits)


class GroupedPlan:
    """Holds the plan of each group, and finds that of a layer by its cache."""

    def __init__(self, plans: list[AttentionPlan], group_of: dict[int, int]) -> None:
        self.plans = plans
        self._group_of = group_of

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._plan_of(kv_cache).slots_of(kv_cache)

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        self._plan_of(kv_cache).write_kv(key, value, kv_cache)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        return self._plan_of(kv_cache).attend(query, kv_cache, rule)

    def _plan_of(self, kv_cache: KVCache) -> AttentionPlan:
        return self.plans[self._group_of[id(kv_cache)]]


class PoolLayers:
    """Holds the groups of one model's layers.

    Attributes:
        groups: The groups; empty: all layers share one block table, and each has a tensor of its own.
        config: The model's configuration, with as many layers as the pool has tensors.
    """

    def __init__(self, config: ModelConfig, groups: list[KVGroup]) -> None:
        self.groups = groups
        self.config = replace(config, num_layers=layers_per_group(groups)) if groups else config
        self._model_config = config

    @property
    def num_groups(self) -> int:
        """Return how many blocks hold the KV of one block of tokens."""
        return max(1, len(self.groups))

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the size of one token's keys and values in all layers that have their own, in bytes."""
        config = self._model_config
        if not self.groups:
            return config.kv_bytes_per_token // config.shard.context_size
        return config.kv_bytes_per_token // config.num_layers * sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_slot(self) -> int:
        """Return the size of what a block holds for one of its tokens on this rank: of the layers of one group, or of
        all layers without groups."""
        return self.config.kv_bytes_per_token // self.config.shard.context_size

    def make_drafter_backend(self, backend: AttentionBackend) -> AttentionBackend:
        """Return the backend of layers whose KV lies behind that of these, of which ``backend`` knows no groups."""
        return FirstGroupBackend(backend, self.num_groups) if self.groups else backend

    def layout(self, block_size: int) -> str:
        """Name the layout of the pool, as :func:`~.cache.kv_layout` does, with the windows of the groups, or with the
        place of the rank that has a part of the model."""
        config = self._model_config
        layout = kv_layout(config, block_size // config.shard.context_size)
        return f"{layout}/{describe_groups(self.groups)}" if self.groups else layout + _place(config, block_size)

    def make_backend(self, make: Callable[[ModelConfig], AttentionBackend], block_size: int) -> AttentionBackend:
        """Return the attention backend of the pool. ``make`` returns one for a model without groups."""
        if not self.groups:
            return make(self.config)
        sources, shapes = self._model_config.kv_sources, self._model_config.kv_shapes
        return GroupedBackend(self.groups, block_size, lambda: make(self.config), sources, shapes)

    def written_bytes_per_token(self, num_layers: int | None) -> int:
        """Return the size of one token's keys and values in the tensors that the first layers write to; None: all."""
        count = min(num_layers or self._model_config.num_layers, self._model_config.num_layers)
        if self.groups:
            count = max(sum(layer < count for layer in group.layers) for group in self.groups)
        config = self._model_config
        return config.kv_bytes_per_token // config.num_layers // config.shard.context_size * count


def _place(config: ModelConfig, block_size: int) -> str:
    """Return the suffix of a layout that says which part of every block this rank keeps; empty: all."""
    shard, layers = config.shard, config.layers_of_model or config.num_layers
    if shard.size == 1 and layers == config.num_layers:
        return ""
    heads = config.num_kv_heads if shard.size == 1 else shard.num_kv_heads
    first_head = 0 if shard.spreads_context else shard.rank * heads // shard.size
    first_token = shard.rank * (block_size // shard.context_size) if shard.spreads_context else 0
    return part_suffix((config.first_layer, first_head, first_token), (layers, heads, block_size))
