"""Computes the layers of decoders; ``DecoderTraits`` and :class:`ModelConfig` hold the differences between families."""

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache, ScoreRule
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.expert_routes import ExpertRoutes
from ..layers.linear import Linear, load_linear
from ..ops.ops import HeadNorm, Ops, Rotation
from ..parallel.group import RankGroup
from ..parallel.sharding import Dimension, joined, length
from .experts import Experts
from .mlp import MLP


class AddNorm:
    """Adds the last part's result to the residual stream, then applies RMSNorm."""

    def __init__(self, checkpoint: Checkpoint, name: str, config: ModelConfig, ops: Ops, size: int = 0) -> None:
        """``size``: of the rows; 0: hidden_size."""
        self._weight = checkpoint.take(f"{name}.weight", size or config.hidden_size)
        self._eps = config.norm_eps
        self._shift = config.traits.norm_shift
        self._ops = ops

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        return self._ops.add_norm(residual, delta, self._weight, self._eps, self._shift)


class Attention:
    """Computes self-attention with rotary positions and grouped queries."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int) -> None:
        self._ops = ops
        self._head_size = config.head_size
        self._rule = ScoreRule(
            config.attention_scales[layer], config.sliding_windows[layer], softcap=config.attention_softcap
        )
        query_size = config.shard.part(config.num_heads * config.head_size)
        kv_size = config.shard.kv_part(config.num_kv_heads, config.head_size)
        sizes = (query_size, kv_size, kv_size)
        parts = ([f"{prefix}.{name}_proj" for name in "qkv"], sizes)
        names, outputs = ([f"{prefix}.qkv_proj"], (joined(sizes),)) if config.traits.is_fused else parts
        hidden, quantization = config.hidden_size, config.quantization
        self._qkv = load_linear(checkpoint, names, hidden, outputs, config.qkv_bias, quantization)
        out_bias = config.attention_output_bias
        self._out = load_linear(checkpoint, [f"{prefix}.o_proj"], query_size, [hidden], out_bias, quantization)
        self._head_norm = _load_head_norm(checkpoint, prefix, config) if config.traits.qk_norm == "head" else None
        if config.traits.qk_norm == "all":
            self._qkv = NormedProjection(self._qkv, checkpoint, prefix, (query_size, kv_size), config, ops)

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        query = self._ops.rotate_and_write(heads, self._head_norm, rotation, kv_cache, plan)
        return self._out(plan.attend(query, kv_cache, self._rule).flatten(1))


def _load_head_norm(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> HeadNorm:
    """Return the query and key norms as one, with a row of weights per head."""
    query = checkpoint.take(f"{prefix}.q_norm.weight", config.head_size).expand(config.num_heads, -1)
    key = checkpoint.take(f"{prefix}.k_norm.weight", config.head_size).expand(config.num_kv_heads, -1)
    return HeadNorm(torch.cat((query, key)), config.norm_eps, config.traits.norm_shift)


class NormedProjection:
    """Projects to queries, keys and values, then applies RMSNorm to a token's queries and to its keys, each as one."""

    def __init__(
        self,
        linear: Linear,
        checkpoint: Checkpoint,
        prefix: str,
        sizes: tuple[Dimension, Dimension],
        config: ModelConfig,
        ops: Ops,
    ) -> None:
        """``sizes``: of all queries, and of all keys."""
        self._linear = linear
        query, key = map(length, sizes)
        parts = ((slice(query), "q", sizes[0]), (slice(query, query + key), "k", sizes[1]))
        self._norms = [
            (columns, _load_row_norm(checkpoint, f"{prefix}.{name}_norm", config, ops, size))
            for columns, name, size in parts
        ]

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        heads = self._linear(x, dtype)
        for columns, norm in self._norms:
            heads[:, columns] = norm(heads[:, columns].contiguous(), None)
        return heads


class SharedNorm:
    """Applies RMSNorm to rows of which each rank has an equal part; equally many ranks may have the same part."""

    def __init__(self, weight: Tensor, eps: float, group: RankGroup) -> None:
        self._weight = weight
        self._eps = eps
        self._group = group

    def __call__(self, rows: Tensor, delta: None) -> Tensor:
        x = rows.float()
        squares = self._group.all_reduce(x.square().sum(-1, keepdim=True))
        mean = squares / (x.shape[-1] * self._group.size)
        return (x * torch.rsqrt(mean + self._eps) * self._weight).to(rows.dtype)


def _load_row_norm(
    checkpoint: Checkpoint, name: str, config: ModelConfig, ops: Ops, size: Dimension
) -> AddNorm | SharedNorm:
    if isinstance(size, int):
        return AddNorm(checkpoint, name, config, ops, size)
    weight = checkpoint.take(f"{name}.weight", size).float() + config.traits.norm_shift
    return SharedNorm(weight, config.norm_eps, checkpoint.group)


class DecoderLayer:
    """Computes attention and MLP, each after a norm and added to its input."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        layer: int,
        routes: ExpertRoutes | None = None,
    ) -> None:
        """``routes`` records the choices of a model with experts."""
        self._input_norm = AddNorm(checkpoint, f"{prefix}.input_layernorm", config, ops)
        self._attention = Attention(checkpoint, f"{prefix}.self_attn", config, ops, layer)
        self._post_norm = AddNorm(checkpoint, f"{prefix}.post_attention_layernorm", config, ops)
        self.mlp = _load_mlp(checkpoint, prefix, config, ops, layer, routes)

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        """Take and return the part that is not yet added to ``residual``; the next norm adds it in the same pass."""
        delta = self._attention(self._input_norm(residual, delta), rotation, kv_cache, plan)
        return self.mlp(self._post_norm(residual, delta))


class PostNormLayer:
    """Computes attention and MLP, each with a norm of its result, and with one of its input if they lie around it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        layer: int,
        routes: ExpertRoutes | None = None,
    ) -> None:
        """``routes`` as in :class:`DecoderLayer`."""

        def norm(name: str) -> AddNorm:
            return AddNorm(checkpoint, f"{prefix}.{name}_layernorm", config, ops)

        around = config.traits.norm_order == "around"
        self._before_attention = norm("input") if around else add
        self._attention = Attention(checkpoint, f"{prefix}.self_attn", config, ops, layer)
        self._after_attention = norm("post_attention")
        self._before_mlp = norm("pre_feedforward") if around else add
        self.mlp = _load_mlp(checkpoint, prefix, config, ops, layer, routes)
        self._after_mlp = norm("post_feedforward")

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        """Take and return what :class:`DecoderLayer` does."""
        attended = self._attention(self._before_attention(residual, delta), rotation, kv_cache, plan)
        delta = self._after_attention(attended, None)
        return self._after_mlp(self.mlp(self._before_mlp(residual, delta)), None)


def add(residual: Tensor, delta: Tensor | None) -> Tensor:
    """Add the last part's result to the residual stream, in place, and return the stream."""
    if delta is not None:
        residual += delta
    return residual


def _load_mlp(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int, routes: ExpertRoutes | None
) -> MLP | Experts:
    if config.experts is not None and config.experts.layers[layer]:
        assert routes is not None
        number = sum(config.experts.layers[:layer])
        return Experts(checkpoint, prefix, config, ops, config.experts, routes.layers[number])
    return MLP(checkpoint, f"{prefix}.mlp", config, ops)
