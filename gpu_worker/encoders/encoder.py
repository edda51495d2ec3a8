"""Loads and computes encoders: BERT and RoBERTa, with learned positions, LayerNorm after each part and bidirectional
attention; ModernBERT, with rotary positions, LayerNorm before each part, a gated MLP, and windows in most layers. The
modules of transformers compute the others, and a table of tokens needs no network."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.directory_source import read_all
from ..checkpoint.encoder_config import EncoderConfig, read_encoder_config
from ..checkpoint.files.architectures import ENCODERS, STATIC
from ..checkpoint.files.config_reader import read_architecture
from ..checkpoint.load_config import check_quantization, note_precision, read_dtype
from ..checkpoint.model_config import DtypeName, as_torch
from ..checkpoint.weights import Checkpoint
from ..layers.activation import ACTIVATIONS
from ..layers.linear import load_linear, report_share
from ..layers.norm import LayerNorm, load_layer_norm
from ..layers.rotary import RotaryEmbedding, rotate, rotation
from ..parallel.ranks import ONLY_RANK, Ranks, Stage
from ..parallel.sharding import Shard, joined
from ..pooling.class_head import ClassHead, class_activation
from ..pooling.sentence_files import PoolingType, Projection


class EncoderPart:
    """Says which part of an encoder a rank computes, and joins its layers to those of other stages."""

    def __init__(self, config: EncoderConfig, ranks: Ranks) -> None:
        place = ranks.place
        self.layers = place.layers(config.num_layers)
        self.is_first, self.is_last = place.stage == 0, place.stage == place.num_stages - 1
        shard = Shard(place.tensor_rank, place.tensor_size)
        self.heads = shard.part(config.hidden_size // place.tensor_size)
        """What queries, keys or values have for this rank's heads."""
        self.inner = shard.part(config.intermediate_size // place.tensor_size)
        """This rank's rows of an MLP."""
        self._stage = Stage(ranks, config.hidden_size, config.dtype) if place.num_stages > 1 else None

    def receive(self, num_tokens: int) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of the stage before."""
        assert self._stage is not None, "the first stage embeds tokens"
        return self._stage.receive(num_tokens)

    def send(self, x: Tensor) -> Tensor:
        """Send hidden states to the stage behind, and return them."""
        assert self._stage is not None, "the last stage returns its states"
        return self._stage.send(x)


class ModernBertLayer:
    """Computes attention and MLP, each after a norm and added to its input."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: EncoderConfig,
        layer: int,
        quantization: str | None,
        part: EncoderPart,
    ) -> None:
        hidden, heads, inner = config.hidden_size, part.heads, part.inner
        attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
        self._head_size = config.head_size
        self._window = config.windows[layer]
        # The checkpoint has no such norm for the first layer: the embeddings are normalized already.
        self._attention_norm = _load_norm(checkpoint, f"{prefix}.attn_norm", config) if layer else None
        qkv, up = joined((heads,) * 3), joined((inner,) * 2)
        self._qkv = load_linear(checkpoint, [f"{prefix}.attn.Wqkv"], hidden, [qkv], attention_bias, quantization)
        self._out = load_linear(checkpoint, [f"{prefix}.attn.Wo"], heads, [hidden], attention_bias, quantization)
        self._mlp_norm = _load_norm(checkpoint, f"{prefix}.mlp_norm", config)
        self._up = load_linear(checkpoint, [f"{prefix}.mlp.Wi"], hidden, [up], mlp_bias, quantization)
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
    """Fulfils :class:`EncoderModel`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EncoderConfig,
        device: torch.device,
        quantization: str | None,
        ranks: Ranks,
    ) -> None:
        self.config, self._part = config, EncoderPart(config, ranks)
        prefix = "model." if "model.embeddings.tok_embeddings.weight" in checkpoint else ""
        table = f"{prefix}embeddings.tok_embeddings.weight"
        if self._part.is_first:
            self._words = checkpoint.take(table, config.vocab_size, config.hidden_size)
            self._embedding_norm = _load_norm(checkpoint, f"{prefix}embeddings.norm", config)
        ropes = list(dict.fromkeys(config.ropes))
        self._rotaries = [RotaryEmbedding(rope, device, rotation) for rope in ropes]
        self._rotary_of_layer = [ropes.index(rope) for rope in config.ropes]
        self._layers = [
            ModernBertLayer(checkpoint, f"{prefix}layers.{layer}", config, layer, quantization, self._part)
            for layer in self._part.layers
        ]
        self._norm = _load_norm(checkpoint, f"{prefix}final_norm", config)
        self.head = _load_modernbert_head(checkpoint, config) if config.num_classes else None
        checkpoint.skip(["head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias"])
        checkpoint.skip(["decoder.weight", "decoder.bias"])

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        part = self._part
        if part.is_first:
            x = self._embedding_norm(F.embedding(token_ids, self._words))
        else:
            x = part.receive(len(token_ids))
        rotations = [rotary(positions) for rotary in self._rotaries]
        for number, layer in zip(part.layers, self._layers, strict=True):
            x = layer(x, rotations[self._rotary_of_layer[number]], begins)
        return self._norm(x) if part.is_last else part.send(x)


def _load_norm(checkpoint: Checkpoint, name: str, config: EncoderConfig) -> LayerNorm:
    size = config.hidden_size
    bias = checkpoint.take(f"{name}.bias", size) if config.norm_bias else None
    return LayerNorm(checkpoint.take(f"{name}.weight", size), bias, config.norm_eps)


def _load_modernbert_head(checkpoint: Checkpoint, config: EncoderConfig) -> ClassHead:
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


_OTHER_HEADS = """cls.predictions.bias cls.predictions.transform.dense.weight cls.predictions.transform.dense.bias
    cls.predictions.transform.LayerNorm.weight cls.predictions.transform.LayerNorm.bias cls.predictions.decoder.weight
    cls.predictions.decoder.bias cls.seq_relationship.weight cls.seq_relationship.bias lm_head.bias lm_head.dense.weight
    lm_head.dense.bias lm_head.layer_norm.weight lm_head.layer_norm.bias lm_head.decoder.weight lm_head.decoder.bias"""


class BertLayer:
    """Computes attention and MLP, each added to its input and then normalized."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: EncoderConfig, quantization: str | None, part: EncoderPart
    ) -> None:
        hidden, heads, inner, eps = config.hidden_size, part.heads, part.inner, config.norm_eps
        names = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
        self._head_size = config.head_size
        self._qkv = load_linear(checkpoint, names, hidden, (heads,) * 3, True, quantization)
        self._out = load_linear(checkpoint, [f"{prefix}.attention.output.dense"], heads, [hidden], True, quantization)
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
    """Fulfils :class:`EncoderModel`."""

    def __init__(self, checkpoint: Checkpoint, config: EncoderConfig, quantization: str | None, ranks: Ranks) -> None:
        self.config, self._part = config, EncoderPart(config, ranks)
        name = "bert" if config.family == "bert" else "roberta"
        prefix = f"{name}." if f"{name}.embeddings.word_embeddings.weight" in checkpoint else ""
        if self._part.is_first:
            self._load_tables(checkpoint, f"{prefix}embeddings", config)
        self._layers = [
            BertLayer(checkpoint, f"{prefix}encoder.layer.{layer}", config, quantization, self._part)
            for layer in self._part.layers
        ]
        self.head = _load_bert_head(checkpoint, prefix, config) if config.num_classes else None
        unused = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
        checkpoint.skip([*(prefix + each for each in unused), *_OTHER_HEADS.split()])

    def _load_tables(self, checkpoint: Checkpoint, prefix: str, config: EncoderConfig) -> None:
        hidden = config.hidden_size
        self._words = checkpoint.take(f"{prefix}.word_embeddings.weight", config.vocab_size, hidden)
        rows = config.max_model_len + config.first_position
        self._positions = checkpoint.take(f"{prefix}.position_embeddings.weight", rows, hidden)
        self._types = checkpoint.take(f"{prefix}.token_type_embeddings.weight", config.num_token_types, hidden)
        self._norm = load_layer_norm(checkpoint, f"{prefix}.LayerNorm", hidden, config.norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        part = self._part
        x = self._embed(token_ids, positions, token_types, begins) if part.is_first else part.receive(len(token_ids))
        for layer in self._layers:
            x = layer(x, begins)
        return x if part.is_last else part.send(x)

    def _embed(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        if first := self.config.first_position:
            positions = first + _without_padding(token_ids == first - 1, begins)
        words = F.embedding(token_ids, self._words) + F.embedding(positions, self._positions)
        return self._norm(words + F.embedding(token_types.clamp(max=len(self._types) - 1), self._types))


def _without_padding(is_padding: Tensor, begins: Sequence[int]) -> Tensor:
    """Return positions [T] as RoBERTa counts them: a prompt's tokens of padding are not counted, and are at -1."""
    counts = torch.cat([(~is_padding[begin:end]).cumsum(0) for begin, end in itertools.pairwise(begins)])
    return torch.where(is_padding, -1, counts - 1)


def _load_bert_head(checkpoint: Checkpoint, prefix: str, config: EncoderConfig) -> ClassHead:
    is_bert = config.family == "bert"
    names = (f"{prefix}pooler.dense", "classifier") if is_bert else ("classifier.dense", "classifier.out_proj")
    hidden, count = config.hidden_size, config.num_classes
    inner = checkpoint.take(f"{names[0]}.weight", hidden, hidden), checkpoint.take(f"{names[0]}.bias", hidden)
    outer = checkpoint.take(f"{names[1]}.weight", count, hidden), checkpoint.take(f"{names[1]}.bias", count)
    projections = (Projection(*inner, torch.tanh), Projection(*outer))
    return ClassHead(projections, class_activation(checkpoint.path), count, "CLS", by_token=False)


@dataclass(frozen=True, slots=True)
class TableConfig:
    """Fulfils :class:`EncoderShape`."""

    dtype_name: DtypeName
    vocab_size: int
    hidden_size: int
    max_model_len: int = 1 << 15


class TokenTable:
    """Fulfils :class:`EncoderModel` for a table of vectors: a token's state is its row, whatever its neighbours are."""

    head: ClassHead | None = None

    def __init__(self, path: Path, dtype: DtypeName, device: torch.device) -> None:
        """Read the table of model2vec, or of sentence-transformers. Raises ``ValueError`` if there is none."""
        tensors = read_all(path)
        table = tensors.get("embeddings", tensors.get("embedding.weight"))
        if table is None or table.dim() != 2:
            raise ValueError(f"{path}: the checkpoint has no tensor embeddings [tokens, size]")
        if "mapping" in tensors:  # several tokens share a row
            table = table[tensors["mapping"].long()]
        if "weights" in tensors:
            table = table.float() * tensors["weights"].float()[:, None]
        self._table = table.to(device, as_torch(dtype))
        self.config = TableConfig(dtype, *self._table.shape)

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        return F.embedding(token_ids, self._table)


class EncoderShape(Protocol):
    """Describes an encoder. Models of equal descriptions can take each other's weights."""

    @property
    def dtype_name(self) -> DtypeName: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


class EncoderModel(Protocol):
    """Holds an encoder with its weights."""

    @property
    def config(self) -> EncoderShape: ...

    @property
    def head(self) -> ClassHead | None:
        """The head of a classifier; None if the model has none."""

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        """Compute the last hidden states [T, hidden_size] of T tokens of R whole prompts.

        Args:
            token_ids: int64 [T], as are ``positions`` in the prompt and ``token_types``, 0 or 1.
            begins: [R + 1] where the tokens of each prompt begin, from 0 to T.
        """


def read_encoder_shape(path: Path, dtype: str = "auto") -> EncoderShape:
    """Read the configuration of a checkpoint directory of an encoder. Raises ``ValueError`` naming what is wrong."""
    name = read_architecture(path)[0]
    if name in ENCODERS:
        return read_encoder_config(path, dtype)
    if name == STATIC:
        return TokenTable(path, read_dtype(path, dtype), torch.device("cpu")).config
    shape: EncoderShape = _of_transformers(path).read_module_config(path, read_dtype(path, dtype))
    return shape


def _of_transformers(path: Path) -> ModuleType:
    """Return the module for encoders of transformers. Raises ``ValueError`` if that library is not installed."""
    try:
        from ..models.transformers import module_encoder
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(
            f"{path / 'config.json'}: architectures names {read_architecture(path)[0]}, which the transformers package "
            'computes; install it with: pip install "tokenloom[transformers]"'
        ) from None
    return module_encoder


def load_encoder(
    path: Path,
    dtype: str = "auto",
    device: torch.device | None = None,
    quantization: str | None = None,
    ranks: Ranks = ONLY_RANK,
) -> EncoderModel:
    """Load the checkpoint directory ``path`` of an encoder, or the part of it that this one of ``ranks`` computes; the
    arguments are those of ``models.load_model``.

    Raises ``ValueError`` naming what the checkpoint lacks, or a feature that is not supported.
    """
    note_precision(path, dtype)
    device = device or torch.device("cpu")
    name = read_architecture(path)[0]
    if name == STATIC:
        return TokenTable(path, read_dtype(path, dtype), device)
    if name not in ENCODERS:
        check_quantization(quantization)
        found: EncoderModel = _of_transformers(path).ModuleEncoder(path, read_dtype(path, dtype), device, quantization)
        return found
    config = read_encoder_config(path, dtype)
    with Checkpoint(path, config.dtype, device, ranks=ranks) as checkpoint:
        model: EncoderModel
        if config.family == "modernbert":
            model = ModernBertModel(checkpoint, config, device, quantization, ranks)
        else:
            model = BertModel(checkpoint, config, quantization, ranks)
        if ranks.place.is_whole:  # other ranks read the rest, and the worker has checked the whole
            checkpoint.refuse_rest()
    if quantization is not None:
        report_share(checkpoint.rounded, quantization)
    return model


def attend(query: Tensor, key: Tensor, value: Tensor, begins: Sequence[int], window: int | None = None) -> Tensor:
    """Let each token attend to all tokens of its prompt, or to those at most ``window`` positions away.

    Args:
        query: [T, num_heads, head_size], as are ``key`` and ``value``.
        begins: [R + 1] where the tokens of each prompt begin, from 0 to T.

    Returns [T, num_heads * head_size].
    """
    parts = []
    for begin, end in itertools.pairwise(begins):
        heads = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
        mask = None
        if window is not None and end - begin > window + 1:
            positions = torch.arange(end - begin, device=query.device)
            mask = (positions[:, None] - positions).abs() <= window
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        parts.append(attended[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)
