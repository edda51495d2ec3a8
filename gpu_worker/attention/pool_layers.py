"""Describes how the layers of a model lie in the KV pool: in one table of blocks, or in groups that share tensors."""

from collections.abc import Callable
from dataclasses import replace

from tokenloom.engine_core.data.kv_groups import KVGroup, describe_groups, layers_per_group

from ..checkpoint.model_config import ModelConfig
from .attention_backend import AttentionBackend
from .cache import kv_layout
from .grouped_backend import GroupedBackend


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

    def layout(self, block_size: int) -> str:
        """Name the layout of the pool, as :func:`~.cache.kv_layout` does, with the windows of the groups."""
        layout = kv_layout(self._model_config, block_size // self._model_config.shard.context_size)
        return f"{layout}/{describe_groups(self.groups)}" if self.groups else layout

    def make_backend(self, make: Callable[[ModelConfig], AttentionBackend], block_size: int) -> AttentionBackend:
        """Return the attention backend of the pool. ``make`` returns one for a model without groups."""
        if not self.groups:
            return make(self.config)
        return GroupedBackend(self.groups, block_size, lambda: make(self.config), self._model_config.kv_sources)

    def written_bytes_per_token(self, num_layers: int | None) -> int:
        """Return the size of one token's keys and values in the tensors that the first layers write to; None: all."""
        count = min(num_layers or self._model_config.num_layers, self._model_config.num_layers)
        if self.groups:
            count = max(sum(layer < count for layer in group.layers) for group in self.groups)
        config = self._model_config
        return config.kv_bytes_per_token // config.num_layers // config.shard.context_size * count
