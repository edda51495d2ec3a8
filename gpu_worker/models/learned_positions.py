"""Computes GPT-2, OPT and the decoder of Whisper: learned absolute positions, LayerNorm before or after each part, a
plain MLP."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache, ScoreRule
from ..attention.cross_backend import CrossPlan
from ..attention.states import StatePlan
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..layers.activation import ACTIVATIONS
from ..layers.embedding import InputEmbeds, embed, load_ends
from ..layers.linear import Linear, load_conv1d, load_linear
from ..layers.norm import LayerNorm, load_layer_norm
from ..ops.ops import Ops
from ..parallel.ranks import Stage
from ..parallel.sharding import joined
from .model import replace_layers

_FIRST_POSITION = 2
"""The row of OPT's position table that belongs to position 0."""


class SelfAttention:
    """Computes multi-head self-attention."""

    def __init__(self, qkv: Linear, out: Linear, config: ModelConfig, layer: int) -> None:
        self._qkv = qkv
        self._out = out
        self._head_size = config.head_size
        self._rule = ScoreRule(config.attention_scales[layer])

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        query, key, value = self._qkv(x).view(x.shape[0], -1, self._head_size).chunk(3, dim=1)
        plan.write_kv(key, value, kv_cache)
        return self._out(plan.attend(query, kv_cache, self._rule).flatten(1))


class CrossAttention:
    """Computes attention over the rows that stand beside a prompt, whose keys and values one step writes."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, layer: int) -> None:
        hidden, heads = config.hidden_size, config.shard.part(config.num_heads * config.head_size)
        query, key, value = (f"{prefix}.{part}_proj" for part in "qkv")
        self._query = load_linear(checkpoint, [query], hidden, [heads], True, config.quantization)
        self._key_value = load_linear(
            checkpoint, [key, value], hidden, [heads] * 2, True, config.quantization, unbiased=[key]
        )
        self._out = load_linear(checkpoint, [f"{prefix}.out_proj"], heads, [hidden], True, config.quantization)
        self._head_size = config.head_size
        self._rule = ScoreRule(config.attention_scales[layer], sees_images=True)
        self._timing_heads = [head for of, head in config.alignment_heads if of == config.first_layer + layer]

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: CrossPlan) -> Tensor:
        for writer, rows in plan.written(x.dtype):
            key, value = self._key_value(rows).view(len(rows), -1, self._head_size).chunk(2, dim=1)
            writer.write_kv(key, value, kv_cache)
        query = self._query(x).view(x.shape[0], -1, self._head_size)
        if self._timing_heads:
            plan.note_weights(query, kv_cache, self._rule, self._timing_heads)
        return self._out(plan.attend_rows(query, kv_cache, self._rule).flatten(1))


class CrossPart:
    """Adds to a layer's input what it sees of the rows beside the prompt, behind a norm."""

    def __init__(self, norm: LayerNorm, attention: CrossAttention) -> None:
        self._norm, self._attention = norm, attention

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, CrossPlan), "the model is computed without a plan of what stands beside prompts"
        return x + self._attention(self._norm(x), kv_cache, plan)


class Block:
    """Computes attention and MLP, each added to its input; the norms are applied before the parts or after the sums."""

    def __init__(
        self,
        attention: SelfAttention,
        up: Linear,
        down: Linear,
        norms: tuple[LayerNorm, LayerNorm],
        config: ModelConfig,
        ops: Ops,
        cross: CrossPart | None = None,
    ) -> None:
        """``norms``: that of attention, and that of the MLP. ``cross``: between both; None: nothing is."""
        self._cross = cross
        self._attention = attention
        self._up = up
        self._down = down
        self._attention_norm, self._mlp_norm = norms
        self._norm_before = config.opt is None or config.opt.norm_before
        self._activation = ops.rowwise(ACTIVATIONS[config.hidden_act])

    def __call__(self, x: Tensor, kv_cache: KVCache, plan: AttentionPlan) -> Tensor:
        if self._norm_before:
            x = x + self._attention(self._attention_norm(x), kv_cache, plan)
            if self._cross is not None:
                x = self._cross(x, kv_cache, plan)
            return x + self._mlp(self._mlp_norm(x))
        x = self._attention_norm(x + self._attention(x, kv_cache, plan))
        return self._mlp_norm(x + self._mlp(x))

    def _mlp(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


class LearnedPositionsModel:
    """Computes the whole model (see :class:`~.model.LanguageModel`)."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, stage: Stage | None = None) -> None:
        """``stage``: as in :class:`~.decoder.DecoderModel`."""
        self.config, self._ops = config, ops
        self._stage = stage
        self._blocks: list[Block] = []
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        self._norm: LayerNorm | None = None
        self.load_weights(checkpoint)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        vars(self).pop("_lm_head", None)  # frees its memory before the new one is packed
        load: dict[str, Callable[[Checkpoint], None]] = {"opt": self._load_opt, "whisper": self._load_whisper}
        load.get(self.config.family, self._load_gpt2)(checkpoint)

    def _load_gpt2(self, checkpoint: Checkpoint) -> None:
        config, hidden = self.config, self.config.hidden_size
        # The first GPT-2 checkpoints hold the tensors without the name of the language model around them.
        prefix = "transformer." if "transformer.wpe.weight" in checkpoint else ""
        self._load_tokens(checkpoint, f"{prefix}wte.weight")
        self._position_embedding = checkpoint.take(f"{prefix}wpe.weight", config.max_model_len, hidden)
        heads = config.shard.part(config.num_heads * config.head_size)
        inner, quantization = config.shard.part(config.intermediate_size), config.quantization

        def load(layer: int) -> Block:
            name = f"{prefix}h.{config.first_layer + layer}"
            norms = [load_layer_norm(checkpoint, f"{name}.ln_{number}", hidden, config.norm_eps) for number in (1, 2)]
            qkv = load_conv1d(checkpoint, f"{name}.attn.c_attn", hidden, joined((heads,) * 3), quantization)
            out = load_conv1d(checkpoint, f"{name}.attn.c_proj", heads, hidden, quantization)
            up = load_conv1d(checkpoint, f"{name}.mlp.c_fc", hidden, inner, quantization)
            down = load_conv1d(checkpoint, f"{name}.mlp.c_proj", inner, hidden, quantization)
            # Causal masks that older checkpoints stored.
            checkpoint.skip((f"{name}.attn.bias", f"{name}.attn.masked_bias"))
            attention = SelfAttention(qkv, out, config, layer)
            return Block(attention, up, down, (norms[0], norms[1]), config, self._ops)

        replace_layers(self._blocks, config.num_layers, load, checkpoint)
        self._norm = load_layer_norm(checkpoint, f"{prefix}ln_f", hidden, config.norm_eps)

    def _load_opt(self, checkpoint: Checkpoint) -> None:
        config, opt = self.config, self.config.opt
        assert opt is not None
        # The first OPT checkpoints hold the tensors without the name of the language model around them.
        prefix = "model.decoder" if "model.decoder.embed_positions.weight" in checkpoint else "decoder"
        checkpoint.skip([f"{prefix}.version"])
        hidden, embedded = config.hidden_size, config.embedding_size
        self._load_tokens(checkpoint, f"{prefix}.embed_tokens.weight")
        rows = config.max_model_len + _FIRST_POSITION
        self._position_embedding = checkpoint.take(f"{prefix}.embed_positions.weight", rows, hidden)[_FIRST_POSITION:]
        if embedded != hidden:
            self._project_in = load_linear(checkpoint, [f"{prefix}.project_in"], embedded, [hidden], bias=False)
            self._project_out = load_linear(checkpoint, [f"{prefix}.project_out"], hidden, [embedded], bias=False)
        heads = config.shard.part(config.num_heads * config.head_size)
        inner, quantization = config.shard.part(config.intermediate_size), config.quantization

        def load_norm(name: str) -> LayerNorm:
            if opt.norms_have_weights:
                return load_layer_norm(checkpoint, name, hidden, config.norm_eps)
            return LayerNorm(None, None, config.norm_eps)

        def load(layer: int) -> Block:
            name = f"{prefix}.layers.{config.first_layer + layer}"
            attention_norm = load_norm(f"{name}.self_attn_layer_norm")
            names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
            qkv = load_linear(checkpoint, names, hidden, (heads,) * 3, config.qkv_bias, quantization)
            out_name = f"{name}.self_attn.out_proj"
            out = load_linear(checkpoint, [out_name], heads, [hidden], config.qkv_bias, quantization)
            mlp_norm = load_norm(f"{name}.final_layer_norm")
            up = load_linear(checkpoint, [f"{name}.fc1"], hidden, [inner], config.mlp_bias, quantization)
            down = load_linear(checkpoint, [f"{name}.fc2"], inner, [hidden], config.mlp_bias, quantization)
            attention = SelfAttention(qkv, out, config, layer)
            return Block(attention, up, down, (attention_norm, mlp_norm), config, self._ops)

        replace_layers(self._blocks, config.num_layers, load, checkpoint)
        self._norm = load_norm(f"{prefix}.final_layer_norm") if opt.final_norm else None

    def _load_whisper(self, checkpoint: Checkpoint) -> None:
        config, hidden, prefix = self.config, self.config.hidden_size, "model.decoder"
        checkpoint.skip_below("model.encoder.")
        self._load_tokens(checkpoint, f"{prefix}.embed_tokens.weight")
        self._position_embedding = checkpoint.take(f"{prefix}.embed_positions.weight", config.max_model_len, hidden)
        heads = config.shard.part(config.num_heads * config.head_size)
        inner, quantization = config.shard.part(config.intermediate_size), config.quantization

        def load_norm(name: str) -> LayerNorm:
            return load_layer_norm(checkpoint, name, hidden, config.norm_eps)

        def load(layer: int) -> Block:
            name = f"{prefix}.layers.{config.first_layer + layer}"
            names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
            qkv = load_linear(checkpoint, names, hidden, (heads,) * 3, True, quantization, unbiased=names[1:2])
            out = load_linear(checkpoint, [f"{name}.self_attn.out_proj"], heads, [hidden], True, quantization)
            up = load_linear(checkpoint, [f"{name}.fc1"], hidden, [inner], True, quantization)
            down = load_linear(checkpoint, [f"{name}.fc2"], inner, [hidden], True, quantization)
            norms = load_norm(f"{name}.self_attn_layer_norm"), load_norm(f"{name}.final_layer_norm")
            attention = CrossAttention(checkpoint, f"{name}.encoder_attn", config, layer)
            cross = CrossPart(load_norm(f"{name}.encoder_attn_layer_norm"), attention)
            return Block(SelfAttention(qkv, out, config, layer), up, down, norms, config, self._ops, cross)

        replace_layers(self._blocks, config.num_layers, load, checkpoint)
        self._norm = load_norm(f"{prefix}.layer_norm")

    def _load_tokens(self, checkpoint: Checkpoint, name: str) -> None:
        config = self.config
        if config.family == "whisper":
            checkpoint.stored_names = (("lm_head", "proj_out"),)
        self._token_embedding, self._lm_head = load_ends(checkpoint, name, config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        plan: AttentionPlan,
        embeds: InputEmbeds = (),
        states: StatePlan | None = None,
    ) -> Tensor:
        if self._stage is None or self.config.first_layer == 0:
            x = embed(self._token_embedding, input_ids, embeds)
            if self._project_in is not None:
                x = self._project_in(x)
            x = x + F.embedding(positions, self._position_embedding)
        else:
            x = self._stage.receive(len(input_ids))
        for block, kv_cache in zip(self._blocks, kv_caches, strict=False):
            x = block(x, kv_cache, plan)
        if self._stage is not None and not self.config.is_last_stage:
            return self._stage.send(x)
        return x if self._norm is None else self._norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self._lm_head is None:  # only warm-up asks for logits where none are computed
            return hidden.float()
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._lm_head(hidden, torch.float32)
