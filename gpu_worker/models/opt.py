"""Computes OPT: learned absolute positions, LayerNorm before or after each part, a plain MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache, ScoreRule
from ..checkpoint.model_config import ModelConfig, OPTSwitches
from ..checkpoint.weights import Checkpoint
from ..layers.activation import ACTIVATIONS
from ..layers.embedding import InputEmbeds, embed, load_embeddings
from ..layers.linear import Linear, load_linear, make_output
from ..layers.norm import LayerNorm, load_layer_norm
from ..parallel.ranks import Stage

_FIRST_POSITION = 2
"""The row of the position table that belongs to position 0."""


class OPTAttention:
    """Computes multi-head self-attention."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, layer: int) -> None:
        self._head_size = config.head_size
        self._rule = ScoreRule(config.attention_scales[layer])
        hidden, bias, quantization = config.hidden_size, config.qkv_bias, config.quantization
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        heads = config.shard.part(config.num_heads * config.head_size)
        self._qkv = load_linear(checkpoint, names, hidden, (heads,) * 3, bias, quantization)
        self._out = load_linear(checkpoint, [f"{prefix}.out_proj"], heads, [hidden], bias, quantization)

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        query, key, value = self._qkv(x).view(x.shape[0], -1, self._head_size).chunk(3, dim=1)
        plan.write_kv(key, value, kv_cache)
        return self._out(plan.attend(query, kv_cache, self._rule).flatten(1))


class OPTBlock:
    """Computes attention and MLP, each added to its input; the norms are applied before the parts or after the sums."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, opt: OPTSwitches, layer: int) -> None:
        hidden, inner, bias, quantization = (
            config.hidden_size,
            config.shard.part(config.intermediate_size),
            config.mlp_bias,
            config.quantization,
        )
        self._norm_before = opt.norm_before
        self._attention_norm = _load_norm(checkpoint, f"{prefix}.self_attn_layer_norm", config, opt)
        self._attention = OPTAttention(checkpoint, f"{prefix}.self_attn", config, layer)
        self._mlp_norm = _load_norm(checkpoint, f"{prefix}.final_layer_norm", config, opt)
        self._up = load_linear(checkpoint, [f"{prefix}.fc1"], hidden, [inner], bias, quantization)
        self._down = load_linear(checkpoint, [f"{prefix}.fc2"], inner, [hidden], bias, quantization)
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        if self._norm_before:
            x = x + self._attention(self._attention_norm(x), kv_cache, plan)
            return x + self._mlp(self._mlp_norm(x))
        x = self._attention_norm(x + self._attention(x, kv_cache, plan))
        return self._mlp_norm(x + self._mlp(x))

    def _mlp(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


class OPTModel:
    """Computes the whole model (see :class:`~.model.Model`)."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, stage: Stage | None = None) -> None:
        """``stage``: as in :class:`~.decoder.DecoderModel`."""
        assert config.opt is not None
        self.config = config
        self._stage = stage
        self._opt = config.opt
        self._blocks: list[OPTBlock] = []
        self.load_weights(checkpoint)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        config, opt = self.config, self._opt
        vars(self).pop("_lm_head", None)  # frees its memory before the new one is packed
        # The first OPT checkpoints hold the tensors without the name of the language model around them.
        prefix = "model.decoder" if "model.decoder.embed_positions.weight" in checkpoint else "decoder"
        checkpoint.skip([f"{prefix}.version"])
        name, hidden, inner = f"{prefix}.embed_tokens.weight", config.hidden_size, config.embedding_size
        self._token_embedding, output = load_embeddings(checkpoint, name, config, inner)
        self._lm_head: Linear | None = make_output(output, config.quantization) if config.samples else None
        rows = config.max_model_len + _FIRST_POSITION
        self._position_embedding = checkpoint.take(f"{prefix}.embed_positions.weight", rows, hidden)[_FIRST_POSITION:]
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        if inner != hidden:
            self._project_in = load_linear(checkpoint, [f"{prefix}.project_in"], inner, [hidden], bias=False)
            self._project_out = load_linear(checkpoint, [f"{prefix}.project_out"], hidden, [inner], bias=False)
        for layer in range(config.num_layers):
            if len(self._blocks) == config.num_layers:
                del self._blocks[0]
                checkpoint.return_dropped()
            self._blocks.append(
                OPTBlock(checkpoint, f"{prefix}.layers.{config.first_layer + layer}", config, opt, layer)
            )
        self._norm = _load_norm(checkpoint, f"{prefix}.final_layer_norm", config, opt) if opt.final_norm else None

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
    ) -> Tensor:
        if self._stage is None or self.config.first_layer == 0:
            x = self._embed(input_ids, positions, embeds)
        else:
            x = self._stage.receive(len(input_ids))
        for block, kv_cache in zip(self._blocks, kv_caches, strict=False):
            x = block(x, kv_cache, plan)
        if self._stage is not None and not self.config.is_last_stage:
            return self._stage.send(x)
        return x if self._norm is None else self._norm(x)

    def _embed(self, input_ids: Tensor, positions: Tensor, embeds: InputEmbeds) -> Tensor:
        x = embed(self._token_embedding, input_ids, embeds)
        if self._project_in is not None:
            x = self._project_in(x)
        return x + F.embedding(positions, self._position_embedding)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self._lm_head is None:  # only warm-up asks for logits where none are drawn
            return hidden.float()
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._lm_head(hidden, torch.float32)


def _load_norm(checkpoint: Checkpoint, name: str, config: ModelConfig, opt: OPTSwitches) -> LayerNorm:
    if opt.norms_have_weights:
        return load_layer_norm(checkpoint, name, config.hidden_size, config.norm_eps)
    return LayerNorm(None, None, config.norm_eps)
