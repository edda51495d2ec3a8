"""Computes GPT-2: learned absolute positions, LayerNorm, a plain MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache, ScoreRule
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.activation import ACTIVATIONS
from ..layers.embedding import InputEmbeds, embed, load_embeddings
from ..layers.linear import Linear, load_conv1d, make_output
from ..layers.norm import load_layer_norm
from ..parallel.ranks import Stage
from ..parallel.sharding import joined


class GPT2Attention:
    """Computes multi-head self-attention."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, layer: int) -> None:
        self._head_size = config.head_size
        self._rule = ScoreRule(config.attention_scales[layer])
        hidden, quantization = config.hidden_size, config.quantization
        heads = config.shard.part(config.num_heads * config.head_size)
        self._qkv = load_conv1d(checkpoint, f"{prefix}.c_attn", hidden, joined((heads,) * 3), quantization)
        self._out = load_conv1d(checkpoint, f"{prefix}.c_proj", heads, hidden, quantization)

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        query, key, value = self._qkv(x).view(x.shape[0], -1, self._head_size).chunk(3, dim=1)
        plan.write_kv(key, value, kv_cache)
        return self._out(plan.attend(query, kv_cache, self._rule).flatten(1))


class GPT2Block:
    """Computes attention and MLP, each after a norm and added to its input."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, layer: int) -> None:
        hidden, inner, eps = config.hidden_size, config.shard.part(config.intermediate_size), config.norm_eps
        self._attention_norm = load_layer_norm(checkpoint, f"{prefix}.ln_1", hidden, eps)
        self._attention = GPT2Attention(checkpoint, f"{prefix}.attn", config, layer)
        self._mlp_norm = load_layer_norm(checkpoint, f"{prefix}.ln_2", hidden, eps)
        self._up = load_conv1d(checkpoint, f"{prefix}.mlp.c_fc", hidden, inner, config.quantization)
        self._down = load_conv1d(checkpoint, f"{prefix}.mlp.c_proj", inner, hidden, config.quantization)
        self._activation = ACTIVATIONS[config.hidden_act]
        # Causal masks that older checkpoints stored.
        checkpoint.skip((f"{prefix}.attn.bias", f"{prefix}.attn.masked_bias"))

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        x = x + self._attention(self._attention_norm(x), kv_cache, plan)
        return x + self._down(self._activation(self._up(self._mlp_norm(x))))


class GPT2Model:
    """Computes the whole model (see :class:`~.model.Model`)."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, stage: Stage | None = None) -> None:
        """``stage``: as in :class:`~.decoder.DecoderModel`."""
        self.config = config
        self._stage = stage
        self._blocks: list[GPT2Block] = []
        self.load_weights(checkpoint)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        config = self.config
        vars(self).pop("_lm_head", None)  # frees its memory before the new one is packed
        # The first GPT-2 checkpoints hold the tensors without the name of the language model around them.
        prefix = "transformer." if "transformer.wpe.weight" in checkpoint else ""
        self._token_embedding, output = load_embeddings(checkpoint, f"{prefix}wte.weight", config)
        self._lm_head: Linear | None = make_output(output, config.quantization) if config.samples else None
        self._position_embedding = checkpoint.take(f"{prefix}wpe.weight", config.max_model_len, config.hidden_size)
        for layer in range(config.num_layers):
            if len(self._blocks) == config.num_layers:
                del self._blocks[0]
                checkpoint.return_dropped()
            self._blocks.append(GPT2Block(checkpoint, f"{prefix}h.{config.first_layer + layer}", config, layer))
        self._norm = load_layer_norm(checkpoint, f"{prefix}ln_f", config.hidden_size, config.norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
    ) -> Tensor:
        if self._stage is None or self.config.first_layer == 0:
            x = embed(self._token_embedding, input_ids, embeds) + F.embedding(positions, self._position_embedding)
        else:
            x = self._stage.receive(len(input_ids))
        for block, kv_cache in zip(self._blocks, kv_caches, strict=False):
            x = block(x, kv_cache, plan)
        return self._norm(x) if self._stage is None or self.config.is_last_stage else self._stage.send(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self._lm_head is None:  # only warm-up asks for logits where none are drawn
            return hidden.float()
        return self._lm_head(hidden, torch.float32)
