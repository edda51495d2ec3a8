"""Describes a model, as read from a checkpoint's ``config.json``."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from tokenloom.engine_core.config import KVCacheDtype
from tokenloom.gguf.gguf_file import is_gguf

from ..attention.int8_cache import SCALE_BYTES
from ..layers.activation import ACTIVATIONS
from ..layers.rotary import RopeConfig, YarnScaling
from .config_reader import ConfigReader
from .families import DECODERS, DecoderTraits
from .gguf.config import gguf_config
from .layer_kinds import read_ropes, read_windows
from .opt_switches import OPTSwitches
from .quantization.scheme import Scheme
from .quantization.schemes import read_scheme
from .safetensors_files import stored_dtype

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "gpt2", "opt", "transformers"
]
"""``transformers``: any class of that library; its modules hold what the switches of :class:`ModelConfig` hold."""

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
}
"""Names every architecture that is built in."""

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_HEAD_STEP = 16

INT8_DYNAMIC = "int8-dynamic"
"""Rounds weights to int8 per output at load, inputs per row; embeddings and output layer keep their dtype."""
INT4 = "int4"
"""Rounds weights to 4 bits by groups of 32 inputs at load, those of the output layer to 8 bits; embeddings keep their
dtype. Inputs are rounded to int8 by the same groups."""
QUANTIZATIONS = (INT8_DYNAMIC, INT4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Holds the shapes and switches of one decoder-only model."""

    family: Family
    dtype: torch.dtype
    """The dtype of weights, activations and, unless ``kv_cache_dtype`` says otherwise, the KV cache."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    """How many tokens prompt and output may have together."""
    norm_eps: float
    hidden_act: str
    """A key of ``activation.ACTIVATIONS``."""
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...] = ()
    """[num_layers]: how each layer rotates its heads; empty: the model has learned absolute positions."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    """The factor on token embeddings, exact in ``dtype``."""
    attention_softcap: float | None = None
    """As :class:`~..attention.score_rule.ScoreRule` says."""
    logit_softcap: float | None = None
    """A logit x becomes logit_softcap * tanh(x / logit_softcap); None: it stays x."""
    opt: OPTSwitches | None = None
    attention_scales: tuple[float, ...]
    """[num_layers]: the factor on query times key."""
    sliding_windows: tuple[int | None, ...]
    """[num_layers]: how many positions a token sees, itself included; None: all."""
    quantization: str | None = None
    """How matrices are quantized at load: one of ``QUANTIZATIONS`` or None."""
    scheme: Scheme | None = None
    """How the checkpoint stores quantized matrices, from ``quantization_config``; None: it stores plain tensors."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """``auto``: the KV cache has ``dtype``; ``int8``: 8 bits, with a scale for each head of each token."""

    @property
    def traits(self) -> DecoderTraits:
        """Return what the family's classes fix, for a family of ``families.DECODERS``."""
        return DECODERS[self.family]

    @property
    def embedding_size(self) -> int:
        """Return the size of a token's embedding, which few models change before the first layer."""
        return self.hidden_size if self.opt is None else self.opt.embedding_size

    @property
    def cache_head_size(self) -> int:
        """Return how many elements of the KV cache a head takes: whole 16s, of which the last may be zeros.

        The C++ kernels read whole vectors, and every backend keeps to it, so that they can exchange blocks.
        """
        return -(-self.head_size // _HEAD_STEP) * _HEAD_STEP

    @property
    def kv_dtype(self) -> torch.dtype:
        """Return the dtype of the KV cache."""
        return torch.int8 if self.kv_cache_dtype == "int8" else self.dtype

    @property
    def kv_row_bytes(self) -> int:
        """Return the size of one token's keys, or values, in one KV head, with their scale if they have one."""
        scale_bytes = SCALE_BYTES if self.kv_cache_dtype == "int8" else 0
        return self.cache_head_size * self.kv_dtype.itemsize + scale_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the size of one token's keys and values in all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.kv_row_bytes

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def load_model_config(path: Path, dtype: str = "auto", quantization: str | None = None) -> ModelConfig:
    """Read the configuration of the checkpoint ``path``, a directory or a GGUF file.

    ``dtype`` is ``auto`` (the checkpoint's own, or bfloat16 with a warning if that is float16), ``float32`` or
    ``bfloat16``; ``quantization`` is None or one of ``QUANTIZATIONS``. Raises ``ValueError`` naming what is wrong or
    not supported in the configuration.
    """
    reader = ConfigReader.of_model(gguf_config(path), path.name) if is_gguf(path) else ConfigReader.open(path)
    family = _family(reader)
    torch_dtype = _dtype(reader, path, dtype)
    scheme = read_scheme(reader)
    match family:
        case "gpt2":
            config = _read_gpt2(reader, torch_dtype)
        case "opt":
            config = _read_opt(reader, torch_dtype)
        case _:
            config = _read_decoder(reader, family, torch_dtype)
    reader.refuse_rest()
    check_quantization(quantization)
    return replace(config, quantization=quantization, scheme=scheme)


def read_dtype(path: Path, dtype: str) -> torch.dtype:
    """Return the dtype in which to compute a checkpoint directory; ``dtype`` is that of :func:`load_model_config`.

    Raises ``ValueError``.
    """
    return _dtype(ConfigReader.open(path), path, dtype)


def check_quantization(quantization: str | None) -> None:
    """Raise ``ValueError`` unless ``quantization`` is a way to quantize at load, or None."""
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization must be {', '.join(QUANTIZATIONS)} or none, not {quantization!r}")


def _family(reader: ConfigReader) -> Family:
    names = reader.take("architectures") or []
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise reader.error("architectures", f"must name one of {known}")
    if names[0] not in ARCHITECTURES:
        raise reader.error("architectures", f"is not supported: must be one of {known}")
    return ARCHITECTURES[names[0]]


def _dtype(reader: ConfigReader, path: Path, dtype: str) -> torch.dtype:
    if dtype == "auto":
        declared = reader.take("dtype") or reader.take("torch_dtype") or stored_dtype(path)
        if declared == "float16":
            log.warning(
                "the checkpoint is float16, which no kernel here computes: it is served as bfloat16, with 3 bits less "
                "precision; dtype float32 keeps all of it, in twice the memory"
            )
            return torch.bfloat16
        if declared not in _DTYPES:
            raise ValueError(f"the checkpoint's dtype {declared} is not supported: choose dtype float32 or bfloat16")
        return _DTYPES[declared]
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be auto, float32 or bfloat16, not {dtype!r}")
    return _DTYPES[dtype]


def _read_decoder(reader: ConfigReader, family: Family, dtype: torch.dtype) -> ModelConfig:
    """Read Llama and its relatives. Absent entries take the defaults of the family's class in transformers."""
    traits = DECODERS[family]
    hidden_size, num_heads = reader.take_int("hidden_size"), reader.take_int("num_attention_heads")
    num_layers = reader.take_int("num_hidden_layers")
    head_size = reader.take_int("head_dim", traits.head_size or hidden_size // num_heads)
    num_kv_heads = reader.take_int("num_key_value_heads", traits.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    if head_size % 2:
        raise reader.error("head_dim", "must be even")
    ropes = read_ropes(reader, family, head_size, num_layers)
    max_model_len = _max_model_len(reader.take_int("max_position_embeddings"), ropes)
    attention_bias = traits.may_have_attention_bias and reader.take_bool("attention_bias", False)
    config = ModelConfig(
        family=family,
        dtype=dtype,
        vocab_size=reader.take_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.take_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=max_model_len,
        norm_eps=reader.take_float("rms_norm_eps", traits.norm_eps),
        hidden_act=_activation(reader, traits.activation_entry, traits.activation),
        tie_word_embeddings=reader.take_bool("tie_word_embeddings", traits.is_tied),
        ropes=ropes,
        qkv_bias=attention_bias or traits.has_qkv_bias,
        attention_output_bias=attention_bias,
        mlp_bias=traits.may_have_mlp_bias and reader.take_bool("mlp_bias", False),
        attention_scales=(head_size**-0.5,) * num_layers,
        sliding_windows=read_windows(reader, family, num_layers, max_model_len),
    )
    return _add_gemma(reader, config) if traits.is_gemma else config


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
        embedding_scale=float(torch.tensor(config.hidden_size**0.5).to(config.dtype)),
    )


def _optional_float(reader: ConfigReader, name: str, default: float | None) -> float | None:
    return None if reader.take(name, default) is None else reader.take_float(name, default)


def _read_gpt2(reader: ConfigReader, dtype: torch.dtype) -> ModelConfig:
    hidden_size, num_heads = reader.take_int("n_embd"), reader.take_int("n_head")
    num_layers = reader.take_int("n_layer")
    if hidden_size % num_heads:
        raise reader.error("n_head", f"must divide n_embd = {hidden_size}")
    head_size = hidden_size // num_heads
    scale = head_size**-0.5 if reader.take_bool("scale_attn_weights", True) else 1.0
    by_layer = reader.take_bool("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        family="gpt2",
        dtype=dtype,
        vocab_size=reader.take_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.take_int("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        max_model_len=reader.take_int("n_positions"),
        norm_eps=reader.take_float("layer_norm_epsilon", 1e-5),
        hidden_act=_activation(reader, "activation_function", "gelu_new"),
        tie_word_embeddings=reader.take_bool("tie_word_embeddings", True),
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        attention_scales=tuple(scale / (layer + 1 if by_layer else 1) for layer in range(num_layers)),
        sliding_windows=(None,) * num_layers,
    )


def _read_opt(reader: ConfigReader, dtype: torch.dtype) -> ModelConfig:
    hidden_size, num_heads = reader.take_int("hidden_size"), reader.take_int("num_attention_heads")
    num_layers = reader.take_int("num_hidden_layers")
    if hidden_size % num_heads:
        raise reader.error("num_attention_heads", f"must divide hidden_size = {hidden_size}")
    head_size, bias = hidden_size // num_heads, reader.take_bool("enable_bias", True)
    norm_before = reader.take_bool("do_layer_norm_before", True)
    return ModelConfig(
        family="opt",
        dtype=dtype,
        vocab_size=reader.take_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.take_int("ffn_dim"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        max_model_len=reader.take_int("max_position_embeddings"),
        norm_eps=1e-5,
        hidden_act=_activation(reader, "activation_function", "relu"),
        tie_word_embeddings=reader.take_bool("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        attention_scales=(head_size**-0.5,) * num_layers,
        sliding_windows=(None,) * num_layers,
        opt=OPTSwitches(
            embedding_size=reader.take_int("word_embed_proj_dim", hidden_size),
            norm_before=norm_before,
            final_norm=norm_before and not reader.take_bool("_remove_final_layer_norm", False),
            norms_have_weights=reader.take_bool("layer_norm_elementwise_affine", True),
        ),
    )


def _activation(reader: ConfigReader, name: str, default: str) -> str:
    activation = reader.take(name) or default
    if activation not in ACTIVATIONS:
        raise reader.error(name, f"is not supported: must be one of {', '.join(ACTIVATIONS)}")
    return str(activation)


def _max_model_len(max_position: int, ropes: tuple[RopeConfig, ...]) -> int:
    """Return the context length. YaRN states the original context and a factor; their product is the context length."""
    scalings = [rope.scaling for rope in ropes if isinstance(rope.scaling, YarnScaling)]
    return max([max_position, *(int(scaling.original_max_position * scaling.factor) for scaling in scalings)])
