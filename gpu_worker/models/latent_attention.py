"""Computes multi-head latent attention, in which all heads share one compressed vector of each token (DeepSeek-V2)."""

from typing import Any

import torch
from torch import Tensor

from ..attention.attention_backend import KVCache
from ..attention.latent_backend import ChangedProjection, LatentProjection
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.linear import load_linear
from ..layers.rotary import halves, rotate
from ..ops.ops import Ops, Rotation

_NORM_EPS = 1e-6
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
        return self._ops.add_norm(rows.contiguous(), None, weight, _NORM_EPS)

    def _rotate(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """Rotate [T, heads, rope_size]. Of queries and keys the result may be permuted in the same way."""
        if self._latent.is_interleaved:
            heads = halves(heads)
        return rotate(heads, *rotation)
