"""Computes what some layers have in the place of attention to each head's own keys: parts that keep a state between
tokens, and multi-head latent attention, in which all heads share one compressed vector of each token (DeepSeek-V2)."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.attention_backend import KVCache
from ..attention.latent_backend import ChangedProjection, LatentProjection
from ..attention.states import LayerStates, StatePlan
from ..checkpoint.model_config import MixerSwitches, ModelConfig
from ..checkpoint.weights import Checkpoint, StoredRows
from ..layers.linear import load_linear
from ..layers.rotary import halves, rotate
from ..ops.ops import Ops, Rotation
from ..ops.state_ops import Convolution, Mamba2Weights
from ..parallel.group import RankGroup
from ..parallel.sharding import Dimension, joined


def _load_convolution(
    checkpoint: Checkpoint, name: str, channels: Dimension, mixer: MixerSwitches, *, has_silu: bool
) -> Convolution:
    weight = checkpoint.take(f"{name}.weight", channels, 1, mixer.taps + 1)
    bias = checkpoint.take(f"{name}.bias", channels) if mixer.has_conv_bias else None
    return Convolution(weight[:, 0].t().contiguous(), bias, has_silu)


class GatedDeltaNet:
    """Computes the gated delta rule over the convolved queries, keys and values of a token (Qwen3-Next, Qwen3.5)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> None:
        assert config.mixer is not None
        mixer, hidden, part = config.mixer, config.hidden_size, config.shard.part
        self._ops, self._mixer, self._eps = ops.states, mixer, config.norm_eps
        keys, values, heads = part(mixer.groups * mixer.state_size), part(mixer.inner_size), part(mixer.heads)
        names, sizes = [f"{prefix}.in_proj_{name}" for name in ("qkv", "z")], [joined((keys, keys, values)), values]
        self._project = load_linear(checkpoint, names, hidden, sizes, False, config.quantization)
        # In the model's dtype whatever the others are rounded to: few outputs, and decays are powers of them.
        names = [f"{prefix}.in_proj_{name}" for name in ("a", "b")]
        self._gates = load_linear(checkpoint, names, hidden, [heads] * 2, False)
        self._conv = _load_convolution(checkpoint, f"{prefix}.conv1d", sizes[0], mixer, has_silu=True)
        self._rates = -checkpoint.take(f"{prefix}.A_log", heads, dtype=torch.float32).exp()
        self._bias = checkpoint.take(f"{prefix}.dt_bias", heads, dtype=torch.float32)
        self._norm = checkpoint.take(f"{prefix}.norm.weight", mixer.head_size)
        outputs = [f"{prefix}.out_proj"]
        self._out = load_linear(checkpoint, outputs, values, [hidden], False, config.quantization)

    def __call__(self, x: Tensor, rotation: Rotation, states: LayerStates, plan: StatePlan) -> Tensor:
        assert states.recurrent is not None
        mixer, rows = self._mixer, self._project(x)
        convolved = self._ops.short_conv(rows[:, : mixer.conv_channels], self._conv, states.conv, plan)
        keys = mixer.groups * mixer.state_size
        query, key = (convolved[:, i * keys : (i + 1) * keys].view(-1, mixer.groups, mixer.state_size) for i in (0, 1))
        value = convolved[:, 2 * keys :].view(-1, mixer.heads, mixer.head_size)
        a, b = self._gates(x).chunk(2, dim=1)
        gates = self._ops.delta_gates(a, b, self._rates, self._bias)
        out = self._ops.gated_delta(query, key, value, gates, states.recurrent, plan)
        gate = rows[:, mixer.conv_channels :].view(-1, mixer.heads, mixer.head_size)
        return self._out(self._ops.gated_norm(out, gate, self._norm, self._eps, norm_first=True).flatten(1))


class KimiDelta:
    """Computes the gated delta rule with a decay of each channel of a key (Kimi-Linear)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> None:
        assert config.mixer is not None
        mixer, hidden, part, quantization = config.mixer, config.hidden_size, config.shard.part, config.quantization
        self._ops, self._states, self._mixer, self._eps = ops, ops.states, mixer, config.norm_eps
        inner, heads, size = part(mixer.inner_size), part(mixer.heads), mixer.head_size
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._project = load_linear(checkpoint, names, hidden, [inner] * 3, False, quantization)
        # In the model's dtype whatever the others are rounded to: few outputs, and decays are powers of them.
        names = [f"{prefix}.{name}_proj" for name in ("f_a", "g_a", "b")]
        self._small = load_linear(checkpoint, names, hidden, [size, size, heads], False)
        self._decay = load_linear(checkpoint, [f"{prefix}.f_b_proj"], size, [inner], False)
        self._gate = load_linear(checkpoint, [f"{prefix}.g_b_proj"], size, [inner], False, quantization)
        parts = [
            _load_convolution(checkpoint, f"{prefix}.{name}_conv1d", inner, mixer, has_silu=True) for name in "qkv"
        ]
        self._conv = Convolution(torch.cat([each.weight for each in parts], 1), None, has_silu=True)
        rates = -checkpoint.take(f"{prefix}.A_log", 1, 1, heads, 1, dtype=torch.float32).exp().flatten()
        self._rates = rates.repeat_interleave(size)
        self._bias = checkpoint.take(f"{prefix}.dt_bias", inner, dtype=torch.float32)
        self._zeros = torch.zeros_like(rates)
        self._norm = checkpoint.take(f"{prefix}.o_norm.weight", size)
        self._out = load_linear(checkpoint, [f"{prefix}.o_proj"], inner, [hidden], False, quantization)

    def __call__(self, x: Tensor, rotation: Rotation, states: LayerStates, plan: StatePlan) -> Tensor:
        assert states.recurrent is not None
        size, heads = self._mixer.head_size, self._mixer.heads
        convolved = self._states.short_conv(self._project(x), self._conv, states.conv, plan)
        query, key, value = (each.view(-1, heads, size) for each in convolved.chunk(3, dim=1))
        small = self._small(x)
        wide = self._decay(small[:, :size].contiguous())
        decay, _ = self._states.delta_gates(wide, wide, self._rates, self._bias)
        b = small[:, 2 * size :]
        _, beta = self._states.delta_gates(b, b, self._zeros, self._zeros)
        gates = (decay.view(-1, heads, size), beta)
        out = self._states.gated_delta(query, key, value, gates, states.recurrent, plan)
        normed = self._ops.add_norm(out.view(-1, size), None, self._norm, self._eps)
        gate = self._gate(small[:, size : 2 * size].contiguous())
        return self._out(self._ops.gate_by_sigmoid(normed.view(len(x), -1), gate))


class Mamba2:
    """Computes Mamba-2 over the convolved inputs of a token (Granite 4)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> None:
        assert config.mixer is not None
        mixer, hidden, shard = config.mixer, config.hidden_size, config.shard
        self._ops, self._mixer, self._eps = ops.states, mixer, config.norm_eps
        inner, heads = shard.part(mixer.inner_size), shard.part(mixer.heads)
        keys = shard.shared_part(mixer.all_groups, mixer.groups, mixer.state_size)
        rows, channels = joined((inner, inner, keys, keys, heads)), joined((inner, keys, keys))
        bias, quantization = mixer.has_bias, config.quantization
        self._project = load_linear(checkpoint, [f"{prefix}.in_proj"], hidden, [rows], bias, quantization)
        self._conv = _load_convolution(checkpoint, f"{prefix}.conv1d", channels, mixer, has_silu=True)
        a, d, dt_bias = (
            checkpoint.take(f"{prefix}.{name}", heads, dtype=torch.float32) for name in ("A_log", "D", "dt_bias")
        )
        self._weights = Mamba2Weights(-a.exp(), d, dt_bias, mixer.dt_limits)
        self._gate = ops.gate
        self._shared: _SharedNorm | None = None
        if mixer.has_norm:
            self._norm = checkpoint.take(f"{prefix}.norm.weight", inner).view(mixer.groups, -1)
        if mixer.has_norm and shard.size > 1 and mixer.all_groups < shard.size:
            self._shared = _SharedNorm(self._norm, config.norm_eps, checkpoint.group, mixer)
        self._out = load_linear(checkpoint, [f"{prefix}.out_proj"], inner, [hidden], bias, quantization)

    def __call__(self, x: Tensor, rotation: Rotation, states: LayerStates, plan: StatePlan) -> Tensor:
        assert states.recurrent is not None
        mixer, rows, inner = self._mixer, self._project(x), self._mixer.inner_size
        end, count = inner + mixer.conv_channels, mixer.groups * mixer.state_size
        convolved = self._ops.short_conv(rows[:, inner:end], self._conv, states.conv, plan)
        inputs = convolved[:, :inner].view(-1, mixer.heads, mixer.head_size)
        b = convolved[:, inner : inner + count].view(-1, mixer.groups, mixer.state_size)
        c = convolved[:, inner + count :].view(-1, mixer.groups, mixer.state_size)
        out = self._ops.mamba2(inputs, b, c, rows[:, end:], self._weights, states.recurrent, plan)
        if not mixer.has_norm:
            both = out.new_empty(len(x), 2 * inner)  # joined in a way that recordings know
            both[:, :inner] = rows[:, :inner]
            both[:, inner:] = out.flatten(1)
            return self._out(self._gate(both, "silu"))
        gate = rows[:, :inner].view(len(x), mixer.groups, -1)
        if self._shared is not None:
            return self._out(self._shared(out.flatten(1), gate.flatten(1)))
        first = mixer.norms_first
        normed = self._ops.gated_norm(out.view(gate.shape), gate, self._norm, self._eps, norm_first=first)
        return self._out(normed.flatten(1))


class _SharedNorm:
    """Applies Mamba-2's norm to a group of which each of several ranks has an equal part."""

    def __init__(self, weight: Tensor, eps: float, group: RankGroup, mixer: MixerSwitches) -> None:
        """``weight``: of this rank's part. The model has fewer groups than ranks."""
        self._weight, self._eps, self._group, self._norms_first = weight.float(), eps, group, mixer.norms_first
        self._num_groups, self._own = mixer.all_groups, group.rank * mixer.all_groups // group.size

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = F.silu(gate.float())
        rows = x.float() if self._norms_first else x.float() * gated
        squares = rows.new_zeros(len(rows), self._num_groups)
        squares[:, self._own] = rows.square().sum(-1)
        size = rows.shape[1] * self._group.size // self._num_groups
        mean = self._group.all_reduce(squares)[:, self._own, None] / size
        normed = rows * torch.rsqrt(mean + self._eps) * self._weight
        return (normed * gated if self._norms_first else normed).to(x.dtype)


class ShortConvolution:
    """Computes a convolution between two gates (LFM2)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> None:
        assert config.mixer is not None
        mixer, hidden, quantization = config.mixer, config.hidden_size, config.quantization
        self._ops, channels = ops.states, config.shard.part(hidden // config.shard.size)
        rows = joined((channels, channels, channels))
        self._project = load_linear(checkpoint, [f"{prefix}.in_proj"], hidden, [rows], mixer.has_bias, quantization)
        self._conv = _load_convolution(checkpoint, f"{prefix}.conv", channels, mixer, has_silu=False)
        outputs = [f"{prefix}.out_proj"]
        self._out = load_linear(checkpoint, outputs, channels, [hidden], mixer.has_bias, quantization)

    def __call__(self, x: Tensor, rotation: Rotation, states: LayerStates, plan: StatePlan) -> Tensor:
        before, after, inputs = self._project(x).chunk(3, dim=1)
        return self._out(self._ops.short_conv(inputs, self._conv, states.conv, plan, (before, after)))


Mixer = GatedDeltaNet | KimiDelta | Mamba2 | ShortConvolution
_KINDS: Mapping[str, type[Mixer]] = {
    "delta": GatedDeltaNet,
    "kimi": KimiDelta,
    "mamba2": Mamba2,
    "conv": ShortConvolution,
}


def load_mixer(checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> Mixer:
    """Load what a layer has in the place of attention. Raises ``ValueError`` as :meth:`Checkpoint.take`."""
    assert config.mixer is not None
    return _KINDS[config.mixer.kind](checkpoint, prefix, config, ops)


def weight_scales(config: ModelConfig) -> dict[str, float | Tensor]:
    """Return the factors on weights and biases, as ``Checkpoint.scales`` says; empty: the family has none."""
    if (factors := config.multipliers) is None:
        return {}
    mixer, size = config.mixer, config.shard.size
    assert mixer is not None
    inner, keys = mixer.inner_size * size, (mixer.all_groups or mixer.groups) * mixer.state_size
    lengths = torch.tensor([inner, inner, keys, keys, mixer.heads * size])
    parts = torch.tensor(factors.mixer_parts).repeat_interleave(lengths)
    both: dict[str, tuple[float | Tensor, float | Tensor]] = {
        "self_attn.q_proj": (factors.attention_in, 1.0),
        "self_attn.k_proj": (factors.attention_in * factors.key, factors.key),
        "self_attn.v_proj": (factors.attention_in, 1.0),
        "self_attn.o_proj": (factors.attention_out, factors.attention_out),
        "feed_forward.gate_proj": (factors.gate, factors.gate),
        "feed_forward.down_proj": (factors.down, factors.down),
        "mamba.in_proj": (factors.mixer_in * parts, parts),
        "mamba.out_proj": (factors.mixer_out, factors.mixer_out),
    }
    kinds = {f"{name}.weight": weight for name, (weight, _) in both.items()}
    kinds |= {f"{name}.bias": bias for name, (_, bias) in both.items()}
    # What is scaled is unpacked, and files of GGUF have the factors in the weights.
    return {name: factor for name, factor in kinds.items() if not bool(torch.all(torch.as_tensor(factor) == 1.0))}


def stored_rows(config: ModelConfig) -> dict[str, StoredRows]:
    """Return the matrices that the family's files hold as rows of others, as ``Checkpoint.stored_rows`` says."""
    found, size = dict[str, StoredRows](), config.shard.size
    if config.traits.has_gated_queries:
        rows = torch.arange(2 * size * config.num_heads * config.head_size).view(-1, 2, config.head_size)
        for name, part in zip(("q_proj", "gate_proj"), rows.unbind(1), strict=True):
            found[f"self_attn.{name}"] = StoredRows("self_attn.q_proj", part.flatten(), rows.numel())
    if config.family == "qwen3_next" and config.mixer is not None:
        found |= _rows_by_key_head(config.mixer, config.mixer.groups * size)
    return found


def _rows_by_key_head(mixer: MixerSwitches, num_groups: int) -> dict[str, StoredRows]:
    """Return the same for a gated delta net of Qwen3-Next: each of ``num_groups`` heads of keys is stored with all that
    belongs to it."""
    values = mixer.heads // mixer.groups
    sizes = [mixer.state_size, mixer.state_size, values * mixer.head_size, values * mixer.head_size]
    rows = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    *parts, z = (part.flatten() for part in torch.split(rows, sizes, dim=1))
    gates = torch.arange(2 * num_groups * values).view(num_groups, 2, values)
    return {
        "linear_attn.in_proj_qkv": StoredRows("linear_attn.in_proj_qkvz", torch.cat(parts), rows.numel()),
        "linear_attn.in_proj_z": StoredRows("linear_attn.in_proj_qkvz", z, rows.numel()),
        "linear_attn.in_proj_b": StoredRows("linear_attn.in_proj_ba", gates[:, 0].flatten(), gates.numel()),
        "linear_attn.in_proj_a": StoredRows("linear_attn.in_proj_ba", gates[:, 1].flatten(), gates.numel()),
    }


_LATENT_EPS = 1e-6
"""Of the norms of compressed vectors, whatever the configuration says of the others."""


class LatentAttention:
    """Compresses each token to one vector and a rotated key, which the KV cache holds, and attends over them."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int) -> None:
        latent = config.latent
        assert latent is not None
        self._latent, self._ops = latent, ops
        hidden, quantization, bias = config.hidden_size, config.quantization, config.qkv_bias
        cached, part = latent.rank + latent.rope_size, config.shard.part
        names, sizes = [f"{prefix}.kv_a_proj_with_mqa"], [cached]
        if latent.query_rank is not None:
            names, sizes = [f"{prefix}.q_a_proj", *names], [latent.query_rank, *sizes]
            self._query_norm = checkpoint.take(f"{prefix}.q_a_layernorm.weight", latent.query_rank)
        self._sizes = [*sizes[:-1], latent.rank, latent.rope_size]
        self._compress = load_linear(checkpoint, names, hidden, sizes, bias, quantization)
        queries = part(config.num_heads * latent.query_size)
        name = "q_proj" if latent.query_rank is None else "q_b_proj"
        inputs = latent.query_rank or hidden
        self._queries = load_linear(checkpoint, [f"{prefix}.{name}"], inputs, [queries], False, quantization)
        self._norm = checkpoint.take(f"{prefix}.kv_a_layernorm.weight", latent.rank)
        rows = part(config.num_heads * (latent.key_size + latent.value_size))
        name, self._changes = f"{prefix}.kv_b_proj", None
        if checkpoint.adapt is not None:
            matrix = checkpoint.part(name, rows, latent.rank)
            self._changes = checkpoint.adapt.matrix(matrix, latent.rank, checkpoint.dtype)
        weight = checkpoint.take(f"{name}.weight", rows, latent.rank)
        self._projection = LatentProjection(weight, latent, config.attention_scales[layer], ops.per_head)
        values, out_bias = part(config.num_heads * latent.value_size), config.attention_output_bias
        self._out = load_linear(checkpoint, [f"{prefix}.o_proj"], values, [hidden], out_bias, quantization)

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: KVCache, plan: Any) -> Tensor:
        """``plan``: with the calls of :class:`~..attention.latent_backend.LatentPlan`."""
        latent = self._latent
        *query, vector, key = torch.split(self._compress(x), self._sizes, dim=1)
        rotated = self._rotate(key[:, None], rotation)[:, 0]
        plan.write_latents(torch.cat((self._normed(vector, self._norm), rotated), dim=1), kv_cache)
        compressed = self._normed(query[0], self._query_norm) if query else x
        heads = self._queries(compressed).view(len(x), -1, latent.query_size)
        plain, turning = torch.split(heads, [latent.key_size, latent.rope_size], dim=2)
        turned = self._rotate(turning, rotation)
        attended: Tensor = plan.attend_latents(plain, turned, kv_cache, self._projection)
        if self._changes is not None:
            # All rows once more for each such adapter of the step: attention takes the rows of whole requests.
            for change, own in self._changes.groups(x.device):
                projection = ChangedProjection(self._projection, change)
                attended[own] = plan.attend_latents(plain, turned, kv_cache, projection)[own]
        return self._out(attended)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._ops.add_norm(rows.contiguous(), None, weight, _LATENT_EPS)

    def _rotate(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """Rotate [T, heads, rope_size]. Of queries and keys the result may be permuted in the same way."""
        if self._latent.is_interleaved:
            heads = halves(heads)
        return rotate(heads, *rotation)
