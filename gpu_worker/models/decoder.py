"""Llama, Mistral, Qwen2 and Qwen3: one decoder whose differences are switches of :class:`ModelConfig`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import ACTIVATIONS
from ..attention.interface import AttentionPlan, KVCache
from ..embedding import load_embeddings
from ..linear import load_linear, make_linear
from ..model_config import ModelConfig
from ..norm import RMSNorm, load_rms_norm
from ..rotary import RotaryEmbedding, rotate
from ..weights import Checkpoint


class Attention:
    """Self-attention with rotary positions and grouped queries."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, layer: int) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_size = config.head_size
        self._scale = config.attention_scales[layer]
        self._sliding_window = config.sliding_windows[layer]
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        sizes = (query_size, kv_size, kv_size)
        self._qkv = load_linear(checkpoint, names, config.hidden_size, sizes, config.qkv_bias)
        self._out = load_linear(
            checkpoint, [f"{prefix}.o_proj"], query_size, [config.hidden_size], config.attention_output_bias
        )
        self._qk_norm = _load_qk_norm(checkpoint, prefix, config) if config.qk_norm else None

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        query_key, value = heads[:, : -self._num_kv_heads], heads[:, -self._num_kv_heads :]
        if self._qk_norm is not None:
            query_key = self._qk_norm(query_key)
        query_key = rotate(query_key, *rotation)
        plan.write_kv(query_key[:, self._num_heads :], value, kv_cache)
        attended = plan.attend(query_key[:, : self._num_heads], kv_cache, self._scale, self._sliding_window)
        return self._out(attended.flatten(1))


def _load_qk_norm(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> RMSNorm:
    """Query and key norms as one over their heads side by side: a weight row per head."""
    query = checkpoint.take(f"{prefix}.q_norm.weight", config.head_size).expand(config.num_heads, -1)
    key = checkpoint.take(f"{prefix}.k_norm.weight", config.head_size).expand(config.num_kv_heads, -1)
    return RMSNorm(torch.cat((query, key)), config.norm_eps)


class MLP:
    """down(act(gate(x)) · up(x)), gate and up as one multiplication."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = load_linear(checkpoint, names, hidden, (inner, inner), config.mlp_bias)
        self._down = load_linear(checkpoint, [f"{prefix}.down_proj"], inner, [hidden], config.mlp_bias)
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, layer: int) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        self._input_norm = load_rms_norm(checkpoint, f"{prefix}.input_layernorm", hidden, eps)
        self._attention = Attention(checkpoint, f"{prefix}.self_attn", config, layer)
        self._post_norm = load_rms_norm(checkpoint, f"{prefix}.post_attention_layernorm", hidden, eps)
        self._mlp = MLP(checkpoint, f"{prefix}.mlp", config)

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        x = x + self._attention(self._input_norm(x), rotation, kv_cache, plan)
        return x + self._mlp(self._post_norm(x))


class DecoderModel:
    """The whole model (see :class:`~.interface.Model`)."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> None:
        assert config.rope is not None
        self.config = config
        self._embedding, output = load_embeddings(checkpoint, "model.embed_tokens.weight", config)
        self._lm_head = make_linear(output)
        self._rotary = RotaryEmbedding(config.rope, config.dtype, device)
        self._layers = [
            DecoderLayer(checkpoint, f"model.layers.{layer}", config, layer) for layer in range(config.num_layers)
        ]
        self._norm = load_rms_norm(checkpoint, "model.norm", config.hidden_size, config.norm_eps)
        # Older checkpoints stored the frequencies that the configuration determines.
        checkpoint.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers))

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], plan: AttentionPlan) -> Tensor:
        x = F.embedding(input_ids, self._embedding)
        rotation = self._rotary(positions)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x = layer(x, rotation, kv_cache, plan)
        return self._norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(hidden).float()
