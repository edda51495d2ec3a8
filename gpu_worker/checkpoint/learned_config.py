"""Reads the configurations of GPT-2, OPT and the decoder of Whisper, whose positions are learned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .files.architectures import (
    Family,
)
from .files.config_reader import ConfigReader
from .layer_kinds import read_activation
from .model_config import DtypeName, ModelConfig, OPTSwitches


class _Names(NamedTuple):
    """Holds what a family with learned positions calls its entries."""

    hidden: str
    heads: str
    layers: str
    inner: str
    length: str
    activation: str


_NAMES = {
    "gpt2": _Names("n_embd", "n_head", "n_layer", "n_inner", "n_positions", "gelu_new"),
    "opt": _Names(
        "hidden_size", "num_attention_heads", "num_hidden_layers", "ffn_dim", "max_position_embeddings", "relu"
    ),
    "whisper": _Names(
        "d_model", "decoder_attention_heads", "decoder_layers", "decoder_ffn_dim", "max_target_positions", "gelu"
    ),
}


def read_learned_positions(reader: ConfigReader, family: Family, dtype: DtypeName) -> ModelConfig:
    """Read GPT-2, OPT or the decoder of Whisper."""
    names, is_opt = _NAMES[family], family == "opt"
    hidden_size, num_heads = reader.take_int(names.hidden), reader.take_int(names.heads)
    num_layers = reader.take_layers(names.layers)
    if hidden_size % num_heads:
        raise reader.error(names.heads, f"must divide {names.hidden} = {hidden_size}")
    head_size, scale, by_layer, bias = hidden_size // num_heads, (hidden_size // num_heads) ** -0.5, False, True
    if is_opt:
        bias = reader.take_bool("enable_bias", True)
    elif family == "gpt2":
        scale = scale if reader.take_bool("scale_attn_weights", True) else 1.0
        by_layer = reader.take_bool("scale_attn_by_inverse_layer_idx", False)
    config = ModelConfig(
        family=family,
        dtype_name=dtype,
        vocab_size=reader.take_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.take_int(names.inner, None if is_opt else 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        max_model_len=reader.take_int(names.length),
        norm_eps=reader.take_float("layer_norm_epsilon", 1e-5) if family == "gpt2" else 1e-5,
        hidden_act=read_activation(reader, "activation_function", names.activation),
        tie_word_embeddings=reader.take_bool("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        attention_scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(num_layers)),
        sliding_windows=(None,) * num_layers,
        opt=_read_opt(reader, hidden_size) if is_opt else None,
    )
    return _add_whisper(reader, config) if family == "whisper" else config


_OF_TOWER = (
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "encoder_layerdrop", "num_hidden_layers"),
    *("num_mel_bins", "apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks"),
    *("mask_feature_prob", "mask_feature_length", "mask_feature_min_masks"),
)
"""Entries of Whisper's encoder, which the service of encoders reads, and of its training."""
_OF_TRANSCRIPTS = (
    *("is_encoder_decoder", "decoder_layerdrop", "forced_decoder_ids", "alignment_heads"),
    *("use_weighted_layer_sum", "classifier_proj_size", "scale_embedding"),
)
"""Entries of other classes, of what is made of the tokens, and one that the decoder's class does not use."""


def _add_whisper(reader: ConfigReader, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the rows of a sound to which each layer attends."""
    for name in (*_OF_TOWER, *_OF_TRANSCRIPTS):
        reader.take(name)
    rows = reader.take_int("max_source_positions")
    if rows < config.max_model_len:
        raise reader.unsupported(
            "max_source_positions", f"must be at least max_target_positions = {config.max_model_len}"
        )
    width = reader.take_int("median_filter_width", 7)
    if width % 2 == 0:
        raise reader.error("median_filter_width", "must be odd")
    return replace(config, cross_rows=rows, median_filter_width=width)


def alignment_heads(path: Path, config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return what ``generation_config.json`` names. Raises ``ValueError`` for a head that the model does not have."""
    file = path / "generation_config.json"
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("alignment_heads") or [] if file.is_file() else []
        heads = tuple((int(layer), int(head)) for layer, head in named)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{file}: alignment_heads must be a list of pairs of a layer and a head") from None
    for layer, head in heads:
        if not (0 <= layer < config.num_layers and 0 <= head < config.num_heads):
            raise ValueError(
                f"{file}: alignment_heads names layer {layer}, head {head}; the decoder has {config.num_layers} layers "
                f"of {config.num_heads} heads, counted from 0"
            )
    return heads


def _read_opt(reader: ConfigReader, hidden_size: int) -> OPTSwitches:
    norm_before = reader.take_bool("do_layer_norm_before", True)
    return OPTSwitches(
        embedding_size=reader.take_int("word_embed_proj_dim", hidden_size),
        norm_before=norm_before,
        final_norm=norm_before and not reader.take_bool("_remove_final_layer_norm", False),
        norms_have_weights=reader.take_bool("layer_norm_elementwise_affine", True),
    )
