"""The layers of Llama and its relatives: norms, attention, and where both stand in a layer. ``DecoderTraits`` and
:class:`ModelConfig` hold the differences between families."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache, ScoreRule
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.rope_config import QueryScaling
from ..checkpoint.weights import Checkpoint
from ..layers.expert_routes import ExpertRoutes
from ..layers.linear import Linear, load_linear
from ..layers.norm import RowNorm
from ..layers.rotary import halves
from ..ops.ops import HeadNorm, LayerParts, Ops, Rotation
from ..parallel.group import RankGroup
from ..parallel.sharding import Dimension, joined, length
from .experts import Experts
from .mixers import LatentAttention, load_mixer
from .mlp import MLP, UngatedMLP


class AddNorm:
    """Adds the last part's result to the residual stream, then applies RMSNorm."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        config: ModelConfig,
        ops: Ops,
        size: int = 0,
        eps: float | None = None,
        *,
        shifts: bool = True,
    ) -> None:
        """``size``: of the rows; 0: hidden_size. ``eps``: None: the model's. ``shifts``: whether the family's shift
        is added to weights."""
        weight = checkpoint.take(f"{name}.weight", size or config.hidden_size)
        eps, shift = config.norm_eps if eps is None else eps, config.traits.norm_shift if shifts else 0.0
        self.norm = RowNorm(weight, eps, shift)
        self._ops = ops

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        return self._ops.add_norm(residual, delta, *self.norm)


class Attention:
    """Computes self-attention with rotary positions and grouped queries."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int, num_inputs: int = 0
    ) -> None:
        """``num_inputs``: the size of the rows that it reads; 0: hidden_size."""
        self._ops = ops
        self._head_size, has_sinks = config.head_size, config.traits.has_sinks
        sinks = checkpoint.take(f"{prefix}.sinks", config.shard.part(config.num_heads)).float() if has_sinks else None
        scale, window = config.attention_scales[layer], config.sliding_windows[layer]
        chunk = config.attention_chunks[layer] if config.attention_chunks else None
        sees_images = config.shows_whole_images(layer)
        self._rule = ScoreRule(scale, window, config.attention_softcap, sinks, chunk, sees_images)
        query_size = config.shard.part(config.num_heads * config.head_size)
        kv_size = config.shard.kv_part(config.num_kv_heads, config.head_size)
        sizes = (query_size, kv_size, kv_size)
        parts = ([f"{prefix}.{name}_proj" for name in "qkv"], sizes)
        names, outputs = ([f"{prefix}.qkv_proj"], (joined(sizes),)) if config.traits.is_fused else parts
        hidden, quantization = config.hidden_size, config.quantization
        self._qkv = load_linear(checkpoint, names, num_inputs or hidden, outputs, config.qkv_bias, quantization)
        out_bias = config.attention_output_bias
        self._out = load_linear(checkpoint, [f"{prefix}.o_proj"], query_size, [hidden], out_bias, quantization)
        self._head_norm = _load_head_norm(checkpoint, prefix, config)
        if config.traits.qk_norm == "all":
            self._qkv = NormedProjection(self._qkv, checkpoint, prefix, (query_size, kv_size), config, ops)
        if config.scales_kv:
            self._scale_kv(checkpoint, prefix, config)

    def _scale_kv(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> None:
        """Divide keys and values by the checkpoint's numbers before they are written. Scores, and what attention finds,
        are multiplied by them, so that no cache and no kernel of attention knows of them."""
        # The next power of two, which loses nothing: the inverse of another number is rounded in 16 bits, and so is
        # each key that it changes. 8-bit floats are as exact near half of their largest number as near that.
        least = 2 / torch.finfo(checkpoint.dtype).max  # float16 has no inverse of smaller numbers
        scales = (max(checkpoint.kv_scale(prefix, kind), least) for kind in "kv")
        key_scale, value_scale = (2.0 ** math.ceil(math.log2(scale)) for scale in scales)
        counts = torch.tensor([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        factors, norm = torch.tensor([1.0, 1 / key_scale, 1 / value_scale]), self._head_norm
        if norm is not None:  # behind which another factor of the keys would be lost
            heads = factors[:2].repeat_interleave(counts[:2]).to(norm.weights.device)[:, None]
            shift = norm.shift if key_scale <= 1 else 0.0  # from which small weights would differ by too little
            weights = (norm.weights.float() + norm.shift) * heads - shift
            self._head_norm = norm._replace(weights=weights.to(norm.weights.dtype), shift=shift)
            factors[1] = 1.0
        columns = factors.repeat_interleave(counts * config.head_size)
        self._qkv = ScaledLinear(self._qkv, None, columns.to(checkpoint.device, checkpoint.dtype))
        self._out = ScaledLinear(self._out, value_scale, None)
        self._rule = replace(self._rule, scale=self._rule.scale * key_scale)

    @property
    def layers(self) -> tuple[Linear, Linear]:
        """Return the layers to queries, keys and values, and from what they find back."""
        return self._qkv, self._out

    @property
    def heads(self) -> tuple[HeadNorm | None, int, ScoreRule]:
        """Return the norm of heads, their size, and the rule of their scores."""
        return self._head_norm, self._head_size, self._rule

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        query = self._ops.rotate_and_write(heads, self._head_norm, rotation, kv_cache, plan)
        return self._out(plan.attend(query, kv_cache, self._rule).flatten(1))


class GatedAttention(Attention):
    """Computes attention whose result is multiplied by the sigmoid of a projection of its input."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int) -> None:
        super().__init__(checkpoint, prefix, config, ops, layer)
        sizes = [config.shard.part(config.num_heads * config.head_size)]
        names = [f"{prefix}.gate_proj"]
        bias = config.qkv_bias and config.traits.has_gated_queries
        self._gate = load_linear(checkpoint, names, config.hidden_size, sizes, bias, config.quantization)

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        query = self._ops.rotate_and_write(heads, self._head_norm, rotation, kv_cache, plan)
        attended = plan.attend(query, kv_cache, self._rule).flatten(1)
        return self._out(self._ops.gate_by_sigmoid(attended, self._gate(x)))


class InterleavedAttention(Attention):
    """Computes the attention of Llama 4: dimensions 2i and 2i + 1 of a head rotate together, before a norm without
    weights; layers that do not rotate heads may scale queries by their positions."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int) -> None:
        super().__init__(checkpoint, prefix, config, ops, layer)
        rope, self._num_kv_heads = config.ropes[layer], config.num_kv_heads
        self._rotates, self._scales_queries = rope.rotates, isinstance(rope.scaling, QueryScaling)
        if self._rotates and config.norms_rotated_heads:
            # The norm of a rotated head is that of the head: it may be applied before.
            self._head_norm = _unit_head_norm(checkpoint, config)

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        if self._rotates:
            turning = heads[:, : -self._num_kv_heads]
            # Queries and keys keep this order: their products do not depend on it.
            heads = torch.cat((halves(turning), heads[:, -self._num_kv_heads :]), dim=1)
            query = self._ops.rotate_and_write(heads, self._head_norm, rotation, kv_cache, plan)
        else:
            count = self._num_kv_heads
            query, key, value = torch.split(heads, [heads.shape[1] - 2 * count, count, count], dim=1)
            plan.write_kv(key, value, kv_cache)
            if self._scales_queries:
                query = (query * rotation[0][..., :1]).to(heads.dtype)
        return self._out(plan.attend(query, kv_cache, self._rule).flatten(1))


def _unit_head_norm(checkpoint: Checkpoint, config: ModelConfig) -> HeadNorm:
    ones = torch.ones(config.num_heads + config.num_kv_heads, config.head_size)
    return HeadNorm(ones.to(checkpoint.device, checkpoint.dtype), config.norm_eps)


def _load_head_norm(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> HeadNorm | None:
    """Return the query and key norms as one, with a row of weights per head; None: there are none of heads."""
    if config.traits.qk_norm != "head":
        return _unit_head_norm(checkpoint, config) if config.traits.qk_norm == "unit" else None
    query = checkpoint.take(f"{prefix}.q_norm.weight", config.head_size).expand(config.num_heads, -1)
    key = checkpoint.take(f"{prefix}.k_norm.weight", config.head_size).expand(config.num_kv_heads, -1)
    return HeadNorm(torch.cat((query, key)), config.norm_eps, config.traits.norm_shift)


class ScaledLinear:
    """Multiplies what a layer reads, or what it finds, by factors."""

    def __init__(self, linear: Linear, before: float | None, after: Tensor | None) -> None:
        """``before``: on all inputs; ``after`` [out]; None: nothing is multiplied there."""
        self._linear = linear
        self._before = before
        self._after = after

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        found = self._linear(x if self._before is None else x * self._before, dtype)
        return found if self._after is None else found.mul_(self._after)


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
        self._mix = _load_mix(checkpoint, prefix, config, ops, layer)
        self._scale = config.residual_scale
        self._post_norm = AddNorm(checkpoint, f"{prefix}.post_attention_layernorm", config, ops)
        self.mlp = _load_mlp(checkpoint, prefix, config, ops, layer, routes)

    @property
    def parts(self) -> LayerParts | None:
        """Return what the layer consists of; None: of more than attention and an MLP."""
        mix, mlp = self._mix, self.mlp
        if type(mix) is not Attention or type(mlp) is not MLP or self._scale != 1.0:
            return None
        norms = self._input_norm.norm, self._post_norm.norm
        return LayerParts(norms, mix.layers, mlp.layers, mlp.activation, *mix.heads)

    def __call__(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kept: Any, plan: Any) -> Tensor:
        """Take and return the part that is not yet added to ``residual``; the next norm adds it in the same pass.
        ``kept`` and ``plan`` are those of what mixes tokens."""
        delta = self._mix(self._input_norm(residual, delta), rotation, kept, plan)
        if self._scale == 1.0:
            return self.mlp(self._post_norm(residual, delta))
        return self.mlp(self._post_norm(residual, delta.mul_(self._scale))).mul_(self._scale)


class PartLayer:
    """Computes one part after a norm: what mixes tokens, or an MLP (Mamba-2, Nemotron-H)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        layer: int,
        routes: ExpertRoutes | None = None,
    ) -> None:
        """``routes``: as those of other layers, though none here has experts."""
        assert config.mixer is not None
        self._norm = AddNorm(checkpoint, f"{prefix}.input_layernorm", config, ops)
        self.mlp: UngatedMLP | None = None
        if any(config.mixer.mlps[layer : layer + 1]):
            self.mlp = UngatedMLP(checkpoint, f"{prefix}.{config.traits.mlp_name}", config, ops)
        else:
            self._mix = _load_mix(checkpoint, prefix, config, ops, layer)

    def __call__(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kept: Any, plan: Any) -> Tensor:
        """Take and return what :class:`DecoderLayer` does; an MLP uses neither ``kept`` nor ``plan``."""
        x = self._norm(residual, delta)
        return self._mix(x, rotation, kept, plan) if self.mlp is None else self.mlp(x)


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
            eps = config.post_norm_eps if name.startswith("post") else None
            return AddNorm(checkpoint, f"{prefix}.{name}_layernorm", config, ops, eps=eps)

        around = config.traits.norm_order == "around"
        self._before_attention = norm("input") if around else add
        self._attention = _load_attention(checkpoint, f"{prefix}.self_attn", config, ops, layer)
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


def _load_mix(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int
) -> Callable[[Tensor, Rotation, Any, Any], Tensor]:
    """Load what mixes the tokens of a sequence. Its last two arguments are the layer's KV cache and the attention plan,
    or its states and the plan of those, or pairs of both, states first."""
    mixer = config.mixer
    if mixer is None:
        return _load_attention(checkpoint, f"{prefix}.self_attn", config, ops, layer)
    if mixer.layers[layer] and not mixer.is_beside_attention:
        return load_mixer(checkpoint, f"{prefix}.{config.traits.state_name}", config, ops)
    attention = _load_attention(checkpoint, f"{prefix}.self_attn", config, ops, mixer.num_attending(layer))
    if not mixer.is_beside_attention:
        return attention
    beside = load_mixer(checkpoint, f"{prefix}.{config.traits.state_name}", config, ops)

    def mix(x: Tensor, rotation: Rotation, kept: Any, plan: Any) -> Tensor:
        return attention(x, rotation, kept[1], plan[1]).add_(beside(x, rotation, kept[0], plan[0]))

    return mix


def _load_attention(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int
) -> Attention | LatentAttention:
    kind: type[Attention] | type[LatentAttention] = LatentAttention if config.latent is not None else Attention
    if config.traits.is_interleaved:
        kind = InterleavedAttention
    if config.traits.has_gate:
        kind = GatedAttention
    return kind(checkpoint, prefix, config, ops, layer)


def _load_mlp(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int, routes: ExpertRoutes | None
) -> MLP | Experts:
    if config.experts is not None and config.experts.layers[layer]:
        assert routes is not None
        number = sum(config.experts.layers[:layer])
        return Experts(checkpoint, prefix, config, ops, config.experts, routes.layers[number])
    name = config.traits.mlp_name
    if config.family == "kimi_linear" and f"{prefix}.{name}.gate_proj.weight" not in checkpoint:
        name = "block_sparse_moe"  # as transformers writes those without experts, too
    return MLP(checkpoint, f"{prefix}.{name}", config, ops)
