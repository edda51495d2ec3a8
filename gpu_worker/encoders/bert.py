"""Computes BERT and RoBERTa: learned positions, LayerNorm after each part, bidirectional attention."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import Checkpoint
from ..layers.activation import ACTIVATIONS
from ..layers.linear import load_linear
from ..layers.norm import load_layer_norm
from ..pooling.class_head import ClassHead, class_activation
from ..pooling.sentence_files import Projection
from .encoder_config import EncoderConfig
from .segments import attend

_OTHER_HEADS = """cls.predictions.bias cls.predictions.transform.dense.weight cls.predictions.transform.dense.bias
    cls.predictions.transform.LayerNorm.weight cls.predictions.transform.LayerNorm.bias cls.predictions.decoder.weight
    cls.predictions.decoder.bias cls.seq_relationship.weight cls.seq_relationship.bias lm_head.bias lm_head.dense.weight
    lm_head.dense.bias lm_head.layer_norm.weight lm_head.layer_norm.bias lm_head.decoder.weight lm_head.decoder.bias"""


class BertLayer:
    """Computes attention and MLP, each added to its input and then normalized."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: EncoderConfig, quantization: str | None) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        names = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
        self._head_size = config.head_size
        self._qkv = load_linear(checkpoint, names, hidden, (hidden,) * 3, True, quantization)
        self._out = load_linear(checkpoint, [f"{prefix}.attention.output.dense"], hidden, [hidden], True, quantization)
        self._attention_norm = load_layer_norm(checkpoint, f"{prefix}.attention.output.LayerNorm", hidden, eps)
        self._up = load_linear(checkpoint, [f"{prefix}.intermediate.dense"], hidden, [inner], True, quantization)
        self._down = load_linear(checkpoint, [f"{prefix}.output.dense"], inner, [hidden], True, quantization)
        self._mlp_norm = load_layer_norm(checkpoint, f"{prefix}.output.LayerNorm", hidden, eps)
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Tensor, begins: Sequence[int]) -> Tensor:
        query, key, value = self._qkv(x).view(len(x), -1, self._head_size).chunk(3, dim=1)
        x = self._attention_norm(x + self._out(attend(query, key, value, begins)))
        return self._mlp_norm(x + self._down(self._activation(self._up(x))))


class BertModel:
    """Computes the whole model (see :class:`~.encoder.Encoder`)."""

    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, quantization: str | None = None) -> None:
        self.config = config
        name = "bert" if config.family == "bert" else "roberta"
        prefix = f"{name}." if f"{name}.embeddings.word_embeddings.weight" in checkpoint else ""
        hidden, embeddings = config.hidden_size, f"{prefix}embeddings"
        self._words = checkpoint.take(f"{embeddings}.word_embeddings.weight", config.vocab_size, hidden)
        rows = config.max_model_len + config.first_position
        positions = checkpoint.take(f"{embeddings}.position_embeddings.weight", rows, hidden)
        self._positions = positions[config.first_position :]
        self._types = checkpoint.take(f"{embeddings}.token_type_embeddings.weight", config.num_token_types, hidden)
        self._norm = load_layer_norm(checkpoint, f"{embeddings}.LayerNorm", hidden, config.norm_eps)
        layers = range(config.num_layers)
        self._layers = [
            BertLayer(checkpoint, f"{prefix}encoder.layer.{layer}", config, quantization) for layer in layers
        ]
        self.head = _load_head(checkpoint, prefix, config) if config.num_classes else None
        unused = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
        checkpoint.skip([*(prefix + each for each in unused), *_OTHER_HEADS.split()])

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        words = F.embedding(token_ids, self._words) + F.embedding(positions, self._positions)
        x = self._norm(words + F.embedding(token_types.clamp(max=len(self._types) - 1), self._types))
        for layer in self._layers:
            x = layer(x, begins)
        return x


def _load_head(checkpoint: Checkpoint, prefix: str, config: EncoderConfig) -> ClassHead:
    is_bert = config.family == "bert"
    names = (f"{prefix}pooler.dense", "classifier") if is_bert else ("classifier.dense", "classifier.out_proj")
    hidden, count = config.hidden_size, config.num_classes
    inner = checkpoint.take(f"{names[0]}.weight", hidden, hidden), checkpoint.take(f"{names[0]}.bias", hidden)
    outer = checkpoint.take(f"{names[1]}.weight", count, hidden), checkpoint.take(f"{names[1]}.bias", count)
    projections = (Projection(*inner, torch.tanh), Projection(*outer))
    return ClassHead(projections, class_activation(checkpoint.path), count, "CLS", by_token=False)
