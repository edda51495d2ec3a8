"""Describes a model, as read from a checkpoint's ``config.json``."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..layers.activation import ACTIVATIONS
from ..layers.rotary import RopeConfig, YarnScaling, read_rope
from .config_reader import ConfigReader
from .quantization.scheme import Scheme
from .quantization.schemes import read_scheme
from .safetensors_files import stored_dtype

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2",
}
"""Names every architecture that can be loaded."""

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
    """The dtype of weights, activations and the KV cache."""
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
    rope: RopeConfig | None = None
    """None: the model has learned absolute positions."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether RMSNorm is applied to each query and key head before rotation."""
    attention_scales: tuple[float, ...]
    """[num_layers]: the factor on query times key."""
    sliding_windows: tuple[int | None, ...]
    """[num_layers]: how many positions a token sees, itself included; None: all."""
    quantization: str | None = None
    """How matrices are quantized at load: one of ``QUANTIZATIONS`` or None."""
    scheme: Scheme | None = None
    """How the checkpoint stores quantized matrices, from ``quantization_config``; None: it stores plain tensors."""

    @property
    def cache_head_size(self) -> int:
        """Return how many elements of the KV cache a head takes: whole 16s, of which the last may be zeros.

        The C++ kernels read whole vectors, and every backend keeps to it, so that they can exchange blocks.
        """
        return -(-self.head_size // _HEAD_STEP) * _HEAD_STEP

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the size of one token's keys and values in all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.cache_head_size * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def load_model_config(path: Path, dtype: str = "auto", quantization: str | None = None) -> ModelConfig:
    """Read the configuration of the checkpoint directory ``path``.

    ``dtype`` is ``auto`` (the checkpoint's own, or bfloat16 with a warning if that is float16), ``float32`` or
    ``bfloat16``; ``quantization`` is None or one of ``QUANTIZATIONS``. Raises ``ValueError`` naming what is wrong or
    not supported in the configuration.
    """
    reader = ConfigReader.open(path)
    family = _family(reader)
    torch_dtype = _dtype(reader, path, dtype)
    scheme = read_scheme(reader)
    config = _read_gpt2(reader, torch_dtype) if family == "gpt2" else _read_decoder(reader, family, torch_dtype)
    reader.refuse_rest()
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization must be {', '.join(QUANTIZATIONS)} or none, not {quantization!r}")
    return replace(config, quantization=quantization, scheme=scheme)


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
    hidden_size, num_heads = reader.take_int("hidden_size"), reader.take_int("num_attention_heads")
    num_layers = reader.take_int("num_hidden_layers")
    head_size = reader.take_int("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
    num_kv_heads = reader.take_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    if head_size % 2:
        raise reader.error("head_dim", "must be even")
    max_position = reader.take_int("max_position_embeddings")
    rope = read_rope(reader, head_size, max_position)
    max_model_len = _max_model_len(max_position, rope)
    attention_bias = reader.take_bool("attention_bias", False) if family in ("llama", "qwen3") else False
    return ModelConfig(
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
        norm_eps=reader.take_float("rms_norm_eps", 1e-6),
        hidden_act=_activation(reader, "hidden_act", "silu"),
        tie_word_embeddings=reader.take_bool("tie_word_embeddings", False),
        rope=rope,
        qkv_bias=attention_bias or family == "qwen2",
        attention_output_bias=attention_bias,
        mlp_bias=reader.take_bool("mlp_bias", False) if family == "llama" else False,
        qk_norm=family == "qwen3",
        attention_scales=(head_size**-0.5,) * num_layers,
        sliding_windows=_sliding_windows(reader, family, num_layers, max_model_len),
    )


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


def _activation(reader: ConfigReader, name: str, default: str) -> str:
    activation = reader.take(name) or default
    if activation not in ACTIVATIONS:
        raise reader.error(name, f"is not supported: must be one of {', '.join(ACTIVATIONS)}")
    return str(activation)


def _max_model_len(max_position: int, rope: RopeConfig | None) -> int:
    """Return the context length. YaRN states the original context and a factor; their product is the context length."""
    if rope is not None and isinstance(rope.scaling, YarnScaling):
        return max(max_position, int(rope.scaling.original_max_position * rope.scaling.factor))
    return max_position


def _sliding_windows(
    reader: ConfigReader, family: Family, num_layers: int, max_model_len: int
) -> tuple[int | None, ...]:
    if family == "llama":
        _check_full_attention(reader, num_layers)
        return (None,) * num_layers
    window = reader.take("sliding_window", 4096)
    if window is not None:
        window = reader.take_int("sliding_window", 4096)
    if family == "mistral":
        windows = [window] * num_layers
        if window is None or window >= max_model_len:
            _check_full_attention(reader, num_layers)
    else:
        windows = _qwen_windows(reader, window, num_layers)
    return tuple(size if size is not None and size < max_model_len else None for size in windows)


def _qwen_windows(reader: ConfigReader, window: int | None, num_layers: int) -> list[int | None]:
    """Return each layer's window. Qwen2 and Qwen3 name each layer's kind, or (older) the first layer with a window."""
    use_window, first = reader.take_bool("use_sliding_window", False), reader.take("max_window_layers", 28)
    if type(first) is not int:
        raise reader.error("max_window_layers", "must be an integer")
    window = window if use_window else None
    kinds = _layer_types(reader, num_layers)
    if kinds is None:
        return [window if layer >= first else None for layer in range(num_layers)]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", "may only hold full_attention and sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise reader.error("layer_types", "has sliding_attention, but use_sliding_window is off")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _layer_types(reader: ConfigReader, num_layers: int) -> list[Any] | None:
    kinds = reader.take("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise reader.error("layer_types", f"must be a list of num_hidden_layers = {num_layers} entries")
    return kinds


def _check_full_attention(reader: ConfigReader, num_layers: int) -> None:
    """Check that every layer attends to all positions, in a model whose class has no other kind of layer."""
    if any(kind != "full_attention" for kind in _layer_types(reader, num_layers) or ()):
        raise reader.error("layer_types", "may only hold full_attention")
