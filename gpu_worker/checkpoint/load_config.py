"""Reads the configuration of a checkpoint by its family. Absent entries take the defaults of the family's class in
transformers. Nothing here imports torch: the checks before a start read the same."""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from tokenloom.gguf.gguf_file import is_gguf
from tokenloom.process.fall_backs import OF_PROCESS

from .files.architectures import (
    ARCHITECTURES,
    BACKBONES,
    CLAMPED_SWIGLU,
    CLASSIFIERS,
    DECODERS,
    LEARNED_POSITIONS,
    Family,
)
from .files.config_reader import IS_CAUSAL, ConfigReader, read_media, stored_dtype, stored_names
from .files.text_part import text_tensor
from .gguf.config import gguf_config
from .layer_kinds import read_activation, read_chunks, read_experts, read_ropes, read_windows
from .learned_config import alignment_heads, read_learned_positions
from .mixer_config import count_parts, read_mamba2, read_mixer, read_multipliers, state_layout
from .model_config import QUANTIZATIONS, DtypeName, LatentSwitches, ModelConfig
from .quantization.entries import read_scheme
from .rope_config import RopeConfig

_DTYPES: dict[str, DtypeName] = {name: name for name in get_args(DtypeName)}


def load_model_config(
    path: Path,
    dtype: str = "auto",
    quantization: str | None = None,
    max_model_len: int | None = None,
    entries: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read the configuration of the checkpoint ``path``, a directory or a GGUF file.

    ``dtype`` is ``auto`` (the checkpoint's own, or bfloat16 if that is float16), ``float32`` or
    ``bfloat16``; ``quantization`` is None or one of ``QUANTIZATIONS``. ``max_model_len`` is the longest request that
    the engine's options allow, None if they state none: a model with long or dynamic rope rotates by it. ``entries``:
    what a plugin makes of those of the file; None: the file's own. Raises ``ValueError`` naming what is wrong or not
    supported in the configuration.
    """
    reader = _reader(path, entries)
    family, has_class_head, is_backbone = _family(reader)
    if reader.take(IS_CAUSAL, True) is not True:
        raise reader.error(IS_CAUSAL, "must be true: only models that embed let tokens attend to later ones")
    computed_in = _dtype(reader, path, dtype)
    scheme = read_scheme(reader)
    if family in LEARNED_POSITIONS:
        config = read_learned_positions(reader, family, computed_in)
    else:
        config = _read_decoder(reader, family, computed_in, max_model_len)
    reader.refuse_rest()
    check_quantization(quantization)
    return replace(
        config,
        alignment_heads=alignment_heads(path, config) if config.cross_rows else (),
        quantization=quantization,
        scheme=scheme,
        has_class_head=has_class_head,
        has_output=not is_backbone and not _lacks_output(path, config),
        media=None if is_gguf(path) or entries is not None else read_media(path),
    )


def read_dtype(path: Path, dtype: str) -> DtypeName:
    """Return the dtype in which to compute a checkpoint; ``dtype`` is that of :func:`load_model_config`.

    Raises ``ValueError``.
    """
    return _dtype(_reader(path), path, dtype)


def _reader(path: Path, entries: Mapping[str, Any] | None = None) -> ConfigReader:
    if entries is not None:
        return ConfigReader.of_model(entries, str(path / "config.json"))
    return ConfigReader.of_model(gguf_config(path), str(path)) if is_gguf(path) else ConfigReader.open(path)


def num_classes(path: Path) -> int:
    """Return how many classes the configuration of a checkpoint directory names. Raises ``ValueError``."""
    reader = ConfigReader.open(path)
    names, count = reader.take("id2label"), reader.take_count("num_labels")
    if names and not isinstance(names, dict | list):
        raise reader.error("id2label", "must be an object with a name for each class")
    return len(names) if names else count or 2


def check_quantization(quantization: str | None) -> None:
    """Raise ``ValueError`` unless ``quantization`` is a way to quantize at load, or None."""
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization must be {', '.join(QUANTIZATIONS)} or none, not {quantization!r}")


def _lacks_output(path: Path, config: ModelConfig) -> bool:
    """Return whether the files of an embedding model lack the output layer that its class has."""
    if config.tie_word_embeddings or not (path / "modules.json").is_file():
        return False
    return "lm_head.weight" not in map(text_tensor, stored_names(path))


def _family(reader: ConfigReader) -> tuple[Family, bool, bool]:
    """Return the family, whether the model has a class head, and whether it was saved without any head."""
    name = reader.take_architecture()
    if name in CLASSIFIERS:
        return CLASSIFIERS[name], True, False
    if name in BACKBONES:
        return BACKBONES[name], False, True
    if name not in ARCHITECTURES:
        raise reader.error("architectures", f"is not supported: must be one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name], False, False


def _dtype(reader: ConfigReader, path: Path, dtype: str) -> DtypeName:
    if dtype == "auto":
        declared = _declared_dtype(reader, path)
        # vLLM serves such a checkpoint in float16, which no kernel here computes on a CPU. bfloat16 loses 3 of the 10
        # bits of fraction; as its range is wider, no value overflows.
        if declared == "float16":
            return "bfloat16"
        if declared not in _DTYPES:
            raise ValueError(f"the checkpoint's dtype {declared} is not supported: choose dtype float32 or bfloat16")
        return _DTYPES[declared]
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}")
    return _DTYPES[dtype]


def _declared_dtype(reader: ConfigReader, path: Path) -> str:
    return str(reader.take("dtype") or reader.take("torch_dtype") or stored_dtype(path))


def note_precision(path: Path, dtype: str, entries: Mapping[str, Any] | None = None) -> None:
    """Report the fall-back of a directory or GGUF file that is computed with less precision than its numbers have.
    ``entries`` as in :func:`load_model_config`."""
    reader = _reader(path, entries)
    if dtype == "auto" and _declared_dtype(reader, path) == "float16":
        OF_PROCESS.begin(
            "less_precision",
            "the checkpoint is float16, which no kernel of a CPU computes: it is served as bfloat16, with 3 bits "
            "less; dtype float32 keeps all of it, in twice the memory, and so does float16 on a GPU",
        )


_KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
"""What Kimi-Linear's files call entries of DeepSeek."""


def _read_decoder(reader: ConfigReader, family: Family, dtype: DtypeName, wanted_model_len: int | None) -> ModelConfig:
    """Read Llama and its relatives."""
    traits = DECODERS[family]
    if family == "mamba2":
        return read_mamba2(reader, dtype, wanted_model_len)
    if family == "kimi_linear":
        reader.rename(_KIMI_NAMES)
    hidden_size, num_heads = reader.take_int("hidden_size"), reader.take_int("num_attention_heads")
    num_layers = all_layers = reader.take_layers("num_hidden_layers", count_parts(reader, family))
    if (mixer := read_mixer(reader, family, hidden_size, all_layers)) is not None:
        num_layers = mixer.num_attending()
    head_size = reader.take_int("head_dim", traits.head_size or hidden_size // num_heads)
    if traits.is_latent:  # as the classes have it, whatever the file says
        head_size = reader.take_int("qk_rope_head_dim", 64)
    num_kv_heads = reader.take_int("num_key_value_heads", traits.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    if head_size % 2:
        raise reader.error("head_dim", "must be even")
    ropes = read_ropes(reader, family, head_size, num_layers, wanted_model_len)
    max_model_len = _max_model_len(family, reader.take_int("max_position_embeddings"), ropes)
    attention_bias = traits.may_have_attention_bias and reader.take_bool("attention_bias", traits.attention_bias)
    qkv_bias = traits.has_qkv_bias and (family != "qwen2_moe" or reader.take_bool("qkv_bias", True))
    inner_size = _inner_size(reader, family)
    config = ModelConfig(
        family=family,
        dtype_name=dtype,
        vocab_size=reader.take_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=max_model_len,
        norm_eps=reader.take_float(traits.norm_eps_entry, traits.norm_eps),
        hidden_act=read_activation(reader, traits.activation_entry, traits.activation),
        tie_word_embeddings=_is_tied(reader, family),
        ropes=ropes,
        qkv_bias=attention_bias or qkv_bias,
        attention_output_bias=attention_bias,
        mlp_bias=traits.has_mlp_bias or (traits.may_have_mlp_bias and reader.take_bool("mlp_bias", False)),
        attention_scales=(head_size**-0.5,) * num_layers,
        sliding_windows=read_windows(reader, family, num_layers, max_model_len),
        experts=read_experts(reader, family, all_layers, inner_size),
        mixer=mixer,
        states=None if mixer is None else state_layout(mixer, hidden_size),
    )
    if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        reader.take("mtp_use_dedicated_embeddings")
        return replace(config, num_further_layers=reader.take_count("mtp_num_hidden_layers"))
    if family == "nemotron_h":
        return replace(config, num_further_layers=reader.take_count("num_nextn_predict_layers"))
    if family == "granitemoehybrid":
        return _add_granite(reader, config)
    if family == "falcon_h1":
        return replace(
            config,
            embedding_scale=_rounded(reader.take_float("embedding_multiplier", 1.0), dtype),
            logit_scale=reader.take_float("lm_head_multiplier", 1.0),
            multipliers=read_multipliers(reader),
        )
    if family == "gpt_oss":
        return replace(config, hidden_act=_clamped_swiglu(reader))
    if family == "llama4":
        longest = min(max_model_len, wanted_model_len or max_model_len)
        return replace(
            config,
            # Of the layers without experts.
            intermediate_size=reader.take_int("intermediate_size_mlp", 16384),
            norms_rotated_heads=reader.take_bool("use_qk_norm", True),
            attention_chunks=read_chunks(reader, num_layers, ropes, longest),
        )
    if family == "muse_glimmer":
        return replace(
            config,
            attention_scales=(head_size**-0.5 * reader.take_float("qk_scale_factor", 3.87),) * num_layers,
            post_norm_eps=reader.take_float("post_norm_eps", 1e-8),
            logit_scale=reader.take_float("output_multiplier", 0.19611613513818404),
            logit_softcap=reader.take_float("final_logit_softcapping", 20.0),
        )
    if traits.is_latent:
        return _add_latent(reader, config)
    return _add_gemma(reader, config) if traits.is_gemma else config


def read_layer(reader: ConfigReader, path: Path, dtype: str) -> ModelConfig:
    """Read the entries of Llama's layers, as heads that draft have them; ``dtype`` as in :func:`load_model_config`. The
    caller refuses the rest. Raises ``ValueError``."""
    return _read_decoder(reader, "llama", _dtype(reader, path, dtype), None)


def _is_tied(reader: ConfigReader, family: Family) -> bool:
    default = DECODERS[family].is_tied
    if family == "lfm2":
        default = reader.take_bool("tie_embedding", default)
    return reader.take_bool("tie_word_embeddings", default)


def _inner_size(reader: ConfigReader, family: Family) -> int:
    """Return the intermediate size of the layers without experts."""
    match family:
        case "qwen3_5_moe":  # every layer has experts
            return reader.take_count("intermediate_size")
        case "granitemoehybrid":
            for of_experts in ("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef"):
                reader.take(of_experts)
            return reader.take_int("shared_intermediate_size", 1024)
        case "lfm2":
            return _lfm2_inner_size(reader)
    return reader.take_int("intermediate_size")


_LFM2_UNREAD = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "num_heads"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "rms_norm_eps", "use_pos_enc"),
)
"""Published files hold them; the class does not read them."""


def _lfm2_inner_size(reader: ConfigReader) -> int:
    """Return the size that LFM2's class derives from the one that the file states."""
    size = reader.take_int("block_ff_dim", reader.take_int("intermediate_size", 12288))
    step, factor = reader.take_int("block_multiple_of", 256), reader.take("block_ffn_dim_multiplier", 1.0)
    for unread in _LFM2_UNREAD:
        reader.take(unread)
    if not reader.take_bool("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // step) * step


def _add_granite(reader: ConfigReader, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the factors of Granite."""
    scale = reader.take_float("attention_multiplier", 1.0)
    return replace(
        config,
        embedding_scale=_rounded(reader.take_float("embedding_multiplier", 1.0), config.dtype_name),
        residual_scale=reader.take_float("residual_multiplier", 1.0),
        logit_scale=1.0 / reader.take_float("logits_scaling", 1.0),
        attention_scales=(scale,) * config.num_layers,
    )


def _clamped_swiglu(reader: ConfigReader) -> str:
    """Return the name of the activation of gpt-oss, whose class does not read ``hidden_act``."""
    for name, known in CLAMPED_SWIGLU.items():
        if reader.take_float(name, known) != known:
            raise reader.unsupported(name, f"must be {known}")
    return "clamped_swiglu"


def _add_latent(reader: ConfigReader, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the compressed KV of DeepSeek-V2 and V3; its ``head_size`` is the rotated part."""
    default = None if config.family == "kimi_linear" else 1536
    query_rank = None if reader.take("q_lora_rank", default) is None else reader.take_int("q_lora_rank", default)
    reader.take("qk_head_dim")  # the sum of its parts
    latent = LatentSwitches(
        rank=reader.take_int("kv_lora_rank", 512),
        rope_size=config.head_size,
        key_size=reader.take_int("qk_nope_head_dim", 128),
        value_size=reader.take_int("v_head_dim", 128),
        query_rank=query_rank,
        is_interleaved=config.family == "deepseek_v2"
        or (config.family != "kimi_linear" and reader.take_bool("rope_interleave", True)),
    )
    factor = config.ropes[0].score_factor
    return replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_size=latent.rank + latent.rope_size,
        attention_scales=(latent.query_size**-0.5 * factor,) * config.num_layers,
        num_further_layers=reader.take_count("num_nextn_predict_layers") or reader.take_count("num_mtp_layers"),
    )


def _add_gemma(reader: ConfigReader, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the entries that only Gemma has."""
    default = 30.0 if config.family == "gemma2" else None
    attention_default = 50.0 if config.family == "gemma2" else None
    attention_softcap = _optional_float(reader, "attn_logit_softcapping", attention_default)
    if config.family == "gemma3" and attention_softcap is not None:
        raise reader.error("attn_logit_softcapping", "must be null: transformers' class ignores it")
    reader.take("hidden_act")  # older files hold it as well; the class reads hidden_activation
    scale = reader.take_float("query_pre_attn_scalar", 256.0) ** -0.5
    return replace(
        config,
        attention_scales=(scale,) * config.num_layers,
        attention_softcap=attention_softcap,
        logit_softcap=_optional_float(reader, "final_logit_softcapping", default),
        embedding_scale=_rounded(config.hidden_size**0.5, config.dtype_name),
    )


def _rounded(value: float, dtype: DtypeName) -> float:
    """Return the number of ``dtype`` that is nearest to a positive float32, ties to even."""
    if dtype != "bfloat16":
        code = "<f" if dtype == "float32" else "<e"
        return float(struct.unpack(code, struct.pack(code, value))[0])
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


def _optional_float(reader: ConfigReader, name: str, default: float | None) -> float | None:
    return None if reader.take(name, default) is None else reader.take_float(name, default)


def _max_model_len(family: Family, max_position: int, ropes: tuple[RopeConfig, ...]) -> int:
    """Return the context length: that of the layers with the shortest one, of those that rotate."""
    scaled = [rope for rope in ropes if rope.rotates]
    if family == "gemma3":  # its max_position_embeddings is the context that linear scaling reaches, as in vLLM
        scaled = [rope for rope in scaled if not isinstance(rope.scaling, float)]
    return min((rope.context(max_position) for rope in scaled), default=max_position)
