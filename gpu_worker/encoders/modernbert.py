"""Computes ModernBERT: rotary positions, LayerNorm before each part, a gated MLP, and windows in most layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import Checkpoint
from ..layers.activation import ACTIVATIONS
from ..layers.linear import load_linear
from ..layers.norm import LayerNorm
from ..layers.rotary import RotaryEmbedding, rotate, rotation
from ..pooling.class_head import ClassHead, class_activation
from ..pooling.sentence_files import PoolingType, Projection
from .encoder_config import EncoderConfig
from .segments import attend


class ModernBertLayer:
    """Computes attention and MLP, each after a norm and added to its input."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: EncoderConfig, layer: int, quantization: str | None
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
        self._head_size = config.head_size
        self._window = config.windows[layer]
        # The first layer reads embeddings that are normalized already.
        self._attention_norm = _load_norm(checkpoint, f"{prefix}.attn_norm", config) if layer else None
        self._qkv = load_linear(checkpoint, [f"{prefix}.attn.Wqkv"], hidden, [3 * hidden], attention_bias, quantization)
        self._out = load_linear(checkpoint, [f"{prefix}.attn.Wo"], hidden, [hidden], attention_bias, quantization)
        self._mlp_norm = _load_norm(checkpoint, f"{prefix}.mlp_norm", config)
        self._up = load_linear(checkpoint, [f"{prefix}.mlp.Wi"], hidden, [2 * inner], mlp_bias, quantization)
        self._down = load_linear(checkpoint, [f"{prefix}.mlp.Wo"], inner, [hidden], mlp_bias, quantization)
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], begins: Sequence[int]) -> Tensor:
        normalized = x if self._attention_norm is None else self._attention_norm(x)
        query, key, value = self._qkv(normalized).view(len(x), -1, self._head_size).chunk(3, dim=1)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        x = x + self._out(attend(query, key, value, begins, self._window))
        up, gate = self._up(self._mlp_norm(x)).chunk(2, dim=-1)
        return x + self._down(self._activation(up) * gate)


class ModernBertModel:
    """Computes the whole model (see :class:`~.encoder.Encoder`)."""

    def __init__(
        self, checkpoint: Checkpoint, config: EncoderConfig, device: torch.device, quantization: str | None = None
    ) -> None:
        self.config = config
        prefix = "model." if "model.embeddings.tok_embeddings.weight" in checkpoint else ""
        table = f"{prefix}embeddings.tok_embeddings.weight"
        self._words = checkpoint.take(table, config.vocab_size, config.hidden_size)
        self._embedding_norm = _load_norm(checkpoint, f"{prefix}embeddings.norm", config)
        ropes = list(dict.fromkeys(config.ropes))
        self._rotaries = [RotaryEmbedding(rope, device, rotation) for rope in ropes]
        self._rotary_of_layer = [ropes.index(rope) for rope in config.ropes]
        self._layers = [
            ModernBertLayer(checkpoint, f"{prefix}layers.{layer}", config, layer, quantization)
            for layer in range(config.num_layers)
        ]
        self._norm = _load_norm(checkpoint, f"{prefix}final_norm", config)
        self.head = _load_head(checkpoint, config) if config.num_classes else None
        checkpoint.skip(["head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias"])
        checkpoint.skip(["decoder.weight", "decoder.bias"])

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        x = self._embedding_norm(F.embedding(token_ids, self._words))
        rotations = [rotary(positions) for rotary in self._rotaries]
        for layer, rotary in zip(self._layers, self._rotary_of_layer, strict=True):
            x = layer(x, rotations[rotary], begins)
        return self._norm(x)


def _load_norm(checkpoint: Checkpoint, name: str, config: EncoderConfig) -> LayerNorm:
    size = config.hidden_size
    bias = checkpoint.take(f"{name}.bias", size) if config.norm_bias else None
    return LayerNorm(checkpoint.take(f"{name}.weight", size), bias, config.norm_eps)


def _load_head(checkpoint: Checkpoint, config: EncoderConfig) -> ClassHead:
    hidden, count, norm = config.hidden_size, config.num_classes, _load_norm(checkpoint, "head.norm", config)
    weight, bias = norm.weight, norm.bias
    wide = LayerNorm(None if weight is None else weight.float(), None if bias is None else bias.float(), norm.eps)
    activation = ACTIVATIONS[config.head_act]
    inner_bias = checkpoint.take("head.dense.bias", hidden) if config.head_bias else None
    inner = checkpoint.take("head.dense.weight", hidden, hidden), inner_bias
    outer = checkpoint.take("classifier.weight", count, hidden), checkpoint.take("classifier.bias", count)
    projections = (Projection(*inner, lambda x: wide(activation(x))), Projection(*outer))
    pooling: PoolingType = "MEAN" if config.head_pools_mean else "CLS"
    return ClassHead(projections, class_activation(checkpoint.path), count, pooling, by_token=False)
