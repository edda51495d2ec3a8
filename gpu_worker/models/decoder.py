"""Computes Llama, Mistral, Qwen2 and Qwen3 with one decoder; switches of :class:`ModelConfig` hold the differences."""

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..attention.score_rule import ScoreRule
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.embedding import InputEmbeds, embed, load_embeddings
from ..layers.linear import load_linear, make_output
from ..layers.rotary import RotaryEmbedding
from ..ops.ops import Ops, Rotation


class AddNorm:
    """Adds the last part's result to the residual stream, then applies RMSNorm."""

    def __init__(self, checkpoint: Checkpoint, name: str, config: ModelConfig, ops: Ops) -> None:
        self._weight = checkpoint.take(f"{name}.weight", config.hidden_size)
        self._eps = config.norm_eps
        self._ops = ops

    def __call__(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        return self._ops.add_norm(residual, delta, self._weight, self._eps)


class Attention:
    """Computes self-attention with rotary positions and grouped queries."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int) -> None:
        self._ops = ops
        self._head_size = config.head_size
        self._rule = ScoreRule(config.attention_scales[layer], config.sliding_windows[layer])
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        sizes = (query_size, kv_size, kv_size)
        hidden, quantization = config.hidden_size, config.quantization
        self._qkv = load_linear(checkpoint, names, hidden, sizes, config.qkv_bias, quantization)
        out_bias = config.attention_output_bias
        self._out = load_linear(checkpoint, [f"{prefix}.o_proj"], query_size, [hidden], out_bias, quantization)
        self._qk_norm = _load_qk_norm(checkpoint, prefix, config) if config.qk_norm else None

    def __call__(self, x: Tensor, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        query = self._ops.rotate_and_write(heads, self._qk_norm, rotation, kv_cache, plan)
        attended = plan.attend(query, kv_cache, self._rule)
        return self._out(attended.flatten(1))


def _load_qk_norm(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> tuple[Tensor, float]:
    """Return the query and key norms as one, with a row of weights per head, and epsilon."""
    query = checkpoint.take(f"{prefix}.q_norm.weight", config.head_size).expand(config.num_heads, -1)
    key = checkpoint.take(f"{prefix}.k_norm.weight", config.head_size).expand(config.num_kv_heads, -1)
    return torch.cat((query, key)), config.norm_eps


class MLP:
    """Computes down(act(gate(x)) · up(x)), with gate and up as one product."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        bias, quantization = config.mlp_bias, config.quantization
        self._gate_up = load_linear(checkpoint, names, hidden, (inner, inner), bias, quantization)
        self._down = load_linear(checkpoint, [f"{prefix}.down_proj"], inner, [hidden], bias, quantization)
        self._activation = config.hidden_act
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._ops.gate(self._gate_up(x), self._activation))


class DecoderLayer:
    """Computes attention and MLP, each after a norm and added to its input."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, layer: int) -> None:
        self._input_norm = AddNorm(checkpoint, f"{prefix}.input_layernorm", config, ops)
        self._attention = Attention(checkpoint, f"{prefix}.self_attn", config, ops, layer)
        self._post_norm = AddNorm(checkpoint, f"{prefix}.post_attention_layernorm", config, ops)
        self._mlp = MLP(checkpoint, f"{prefix}.mlp", config, ops)

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        """Take and return the part that is not yet added to ``residual``; the next norm adds it in the same pass."""
        delta = self._attention(self._input_norm(residual, delta), rotation, kv_cache, plan)
        return self._mlp(self._post_norm(residual, delta))


class DecoderModel:
    """Computes the whole model (see :class:`~.model.Model`)."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, device: torch.device) -> None:
        assert config.rope is not None
        self.config = config
        self._ops = ops
        self._rotary = RotaryEmbedding(config.rope, device)
        self._layers: list[DecoderLayer] = []
        self.load_weights(checkpoint)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        config, ops = self.config, self._ops
        vars(self).pop("_lm_head", None)  # frees its memory before the new one is packed
        self._embedding, output = load_embeddings(checkpoint, "model.embed_tokens.weight", config)
        self._lm_head = make_output(output, config.quantization)
        for layer in range(config.num_layers):
            if len(self._layers) == config.num_layers:
                del self._layers[0]
                checkpoint.return_dropped()
            self._layers.append(DecoderLayer(checkpoint, f"model.layers.{layer}", config, ops, layer))
        self._norm = AddNorm(checkpoint, "model.norm", config, ops)
        # Older checkpoints stored the frequencies that the configuration determines.
        checkpoint.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
    ) -> Tensor:
        residual, delta = embed(self._embedding, input_ids, embeds), None
        rotation = self._rotary(positions)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=False):
            delta = layer(residual, delta, rotation, kv_cache, plan)
        return self._norm(residual, delta)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(hidden, torch.float32)
