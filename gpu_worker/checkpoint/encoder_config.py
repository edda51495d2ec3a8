"""Reads the configurations of encoders."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..parallel.sharding import RankPlace
from .files.architectures import CLASS_HEAD, ENCODERS, STATIC, EncoderFamily
from .files.config_reader import ConfigReader
from .layer_kinds import read_activation
from .load_config import num_classes, read_dtype
from .model_config import DtypeName, as_torch
from .rope_config import RopeConfig, read_rope_by_kind

if TYPE_CHECKING:
    import torch

_SLIDING = "sliding_attention"
_HARMLESS = """attention_probs_dropout_prob hidden_dropout_prob classifier_dropout attention_dropout embedding_dropout
    mlp_dropout directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type gradient_checkpointing initializer_cutoff_factor cls_token_id reference_compile repad_logits_with_grad
    deterministic_flash_attn sparse_pred_ignore_index sparse_prediction decoder_bias tie_word_embeddings output_past
    is_causal"""
"""Change no hidden state. Of these families only ``is_decoder`` makes attention causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Holds the shapes and switches of one encoder."""

    family: EncoderFamily
    dtype_name: DtypeName
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_model_len: int
    norm_eps: float
    hidden_act: str
    num_token_types: int = 0
    """Rows of the table of token types; 0: the model does not distinguish parts."""
    first_position: int = 0
    """The row of the position table that belongs to position 0."""
    num_classes: int = 0
    """Classes of its head; 0: it has none."""
    windows: tuple[int | None, ...] = ()
    """[num_layers]: how far a token sees in both directions; None: it sees the whole prompt."""
    ropes: tuple[RopeConfig, ...] = ()
    """[num_layers]: how each layer rotates its heads; empty: the model has a table of positions."""
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = True
    head_act: str = "gelu"
    head_pools_mean: bool = False

    @property
    def dtype(self) -> "torch.dtype":
        """Return the dtype of :attr:`dtype_name`."""
        return as_torch(self.dtype_name)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def read_encoder_config(path: Path, dtype: str = "auto") -> EncoderConfig:
    """Read the configuration of a checkpoint directory of an encoder. Raises ``ValueError`` naming what is wrong."""
    reader = ConfigReader.open(path)
    architecture = reader.take_architecture()
    family = ENCODERS[architecture]
    shared: dict[str, Any] = {
        "family": family,
        "dtype_name": read_dtype(path, dtype),
        "vocab_size": reader.take_int("vocab_size"),
        "hidden_size": reader.take_int("hidden_size"),
        "intermediate_size": reader.take_int("intermediate_size"),
        "num_layers": reader.take_layers("num_hidden_layers"),
        "num_heads": reader.take_int("num_attention_heads"),
        "num_classes": num_classes(path) if architecture.endswith(CLASS_HEAD) else 0,
    }
    if shared["hidden_size"] % shared["num_heads"]:
        raise reader.error("hidden_size", f"must be a multiple of num_attention_heads = {shared['num_heads']}")
    for name in _HARMLESS.split():
        reader.take(name)
    own = _modernbert_entries(reader, shared) if family == "modernbert" else _bert_entries(reader, family)
    reader.refuse_rest()
    return EncoderConfig(**shared, **own)


def check_parts(config: EncoderConfig | None, place: RankPlace, name: str) -> None:
    """Raise ``ValueError`` naming what of an encoder of the class ``name`` cannot be divided among workers. ``config``:
    None: it is not built in."""
    if place.is_whole:
        return
    if name == STATIC:
        raise ValueError(f"{name} is a table of vectors, without layers to divide among several workers; use one")
    if config is None:
        raise ValueError(f"model_impl: transformers' modules, which compute {name}, are not divided; use one worker")
    if place.data_size > 1 or place.spreads_experts:
        raise ValueError("enable_expert_parallel: an encoder has no experts; leave it out")
    if place.prefill_size > 1:
        raise ValueError("prefill_context_parallel_size: the prompts of encoders are not divided; leave it out")
    if place.spreads_context:
        raise ValueError("decode_context_parallel_size: an encoder keeps no KV to spread; leave it out")
    size = place.tensor_size
    for what, count in (("attention heads", config.num_heads), ("rows of an MLP", config.intermediate_size)):
        if count % size:
            raise ValueError(f"tensor_parallel_size: {size} does not divide the model's {count} {what}")
    if place.num_stages > config.num_layers:
        raise ValueError(f"pipeline_parallel_size: {place.num_stages} stages for {config.num_layers} layers")


def _bert_entries(reader: ConfigReader, family: EncoderFamily) -> dict[str, Any]:
    if reader.take("position_embedding_type", "absolute") != "absolute":
        raise reader.error("position_embedding_type", "must be absolute")
    if reader.take_bool("is_decoder", False):
        raise reader.error("is_decoder", "must be false: causal attention is not supported for this family")
    # RoBERTa counts positions from the row after that of padding.
    padding = None if family == "bert" else reader.take("pad_token_id", 1)
    if family != "bert" and (type(padding) is not int or padding < 0):
        raise reader.error("pad_token_id", "must be a token's number: positions are counted from the row after it")
    first = 0 if padding is None else padding + 1
    return {
        "max_model_len": reader.take_int("max_position_embeddings", 512) - first,
        "norm_eps": reader.take_float("layer_norm_eps", 1e-12),
        "hidden_act": read_activation(reader, "hidden_act", "gelu"),
        "num_token_types": reader.take_int("type_vocab_size", 2),
        "first_position": first,
    }


def _modernbert_entries(reader: ConfigReader, shared: dict[str, Any]) -> dict[str, Any]:
    num_layers, max_model_len = shared["num_layers"], reader.take_int("max_position_embeddings", 8192)
    step = reader.take_int("global_attn_every_n_layers", 3)
    by_step = [_SLIDING if layer % step else "full_attention" for layer in range(num_layers)]
    kinds = reader.take("layer_types") or by_step
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {_SLIDING, "full_attention"}:
        raise reader.error("layer_types", f"must name {_SLIDING} or full_attention for each of {num_layers} layers")
    thetas = {
        "full_attention": reader.take_float("global_rope_theta", 160_000.0),
        _SLIDING: reader.take_float("local_rope_theta", 10_000.0),
    }
    ropes = read_rope_by_kind(reader, shared["hidden_size"] // shared["num_heads"], max_model_len, thetas)
    window = reader.take_int("local_attention", 128) // 2
    if reader.take("sliding_window") is not None:  # the class stores it as half of local_attention
        window = reader.take_int("sliding_window")
    return {
        "max_model_len": max_model_len,
        "norm_eps": reader.take_float("norm_eps", 1e-5),
        "hidden_act": read_activation(reader, "hidden_activation", "gelu"),
        "windows": tuple(window if kind == _SLIDING else None for kind in kinds),
        "ropes": tuple(ropes[kind] for kind in kinds),
        "attention_bias": reader.take_bool("attention_bias", False),
        "mlp_bias": reader.take_bool("mlp_bias", False),
        "norm_bias": reader.take_bool("norm_bias", False),
        "head_bias": reader.take_bool("classifier_bias", False),
        "head_act": read_activation(reader, "classifier_activation", "gelu"),
        "head_pools_mean": reader.take("classifier_pooling", "cls") == "mean",
    }
