"""Describes a model, as read from a checkpoint's ``config.json``."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenloom.engine_core.data.config import KVCacheDtype
from tokenloom.gguf.gguf_file import is_gguf
from tokenloom.process.fall_backs import OF_PROCESS

from ..attention.fp8_cache import FP8_KV
from ..attention.int8_cache import SCALE_BYTES
from ..layers.rotary import LongRopeScaling, RopeConfig
from ..parallel.sharding import WHOLE, Shard
from .config_reader import ConfigReader
from .directory_source import stored_dtype
from .expert_switches import ExpertSwitches
from .families import DECODERS, DecoderTraits
from .gguf.config import gguf_config
from .opt_switches import OPTSwitches
from .quantization.scheme import Scheme
from .quantization.schemes import read_scheme
from .supported import ARCHITECTURES as ARCHITECTURES
from .supported import CLASSIFIERS as CLASSIFIERS
from .supported import Family as Family

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HEAD_STEP = 16

INT8_DYNAMIC = "int8-dynamic"
"""Rounds weights to int8 per output at load, inputs per row; embeddings and output layer keep their dtype."""
INT4 = "int4"
"""Rounds weights to 4 bits by groups of 32 inputs at load, those of the output layer to 8 bits; embeddings keep their
dtype. Inputs are rounded to int8 by the same groups."""
FP8 = "fp8"
"""Rounds weights to 8-bit floats per output at load; inputs of more than a few rows are rounded too, per row.
Embeddings and output layer keep their dtype. For GPUs."""
QUANTIZATIONS = (INT8_DYNAMIC, INT4, FP8)


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
    experts: ExpertSwitches | None = None
    attention_scales: tuple[float, ...]
    """[num_layers]: the factor on query times key."""
    sliding_windows: tuple[int | None, ...]
    """[num_layers]: how many positions a token sees, itself included; None: all."""
    kv_sources: tuple[int, ...] = ()
    """[num_layers]: the layer whose keys and values each one attends to; empty: its own."""
    quantization: str | None = None
    """How matrices are quantized at load: one of ``QUANTIZATIONS`` or None."""
    has_class_head: bool = False
    """Whether classes of prompts are computed instead of logits of tokens."""
    scheme: Scheme | None = None
    """How the checkpoint stores quantized matrices, from ``quantization_config``; None: it stores plain tensors."""

    shard: Shard = WHOLE
    """Which part of each layer this rank computes; the numbers of heads, and the intermediate sizes, are its own."""
    first_layer: int = 0
    """The number in the model of this rank's first layer."""
    is_last_stage: bool = True
    """Whether the model's last layer is among this rank's."""
    draws: bool = True
    """Whether this rank computes logits."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """``auto``: the KV cache has ``dtype``; ``int8``: 8 bits, with a scale for each head of each token; ``fp8``: floats
    of 8 bits (e4m3), without scales."""

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
        return {"auto": self.dtype, "int8": torch.int8, "fp8": FP8_KV}[self.kv_cache_dtype]

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
    def has_long_rope(self) -> bool:
        """Return whether heads are rotated for a context beyond that of the training."""
        return any(isinstance(rope.scaling, LongRopeScaling) and rope.scaling.is_long for rope in self.ropes)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def load_model_config(
    path: Path, dtype: str = "auto", quantization: str | None = None, max_model_len: int | None = None
) -> ModelConfig:
    """Read the configuration of the checkpoint ``path``, a directory or a GGUF file.

    ``dtype`` is ``auto`` (the checkpoint's own, or bfloat16 with a warning if that is float16), ``float32`` or
    ``bfloat16``; ``quantization`` is None or one of ``QUANTIZATIONS``. ``max_model_len`` is the longest request that
    the engine's options allow, None if they state none: a model with long rope rotates by it. Raises ``ValueError``
    naming what is wrong or not supported in the configuration.
    """
    from .family_configs import read_family  # its functions build a ModelConfig

    reader = ConfigReader.of_model(gguf_config(path), path.name) if is_gguf(path) else ConfigReader.open(path)
    family, has_class_head = _family(reader)
    torch_dtype = _dtype(reader, path, dtype)
    scheme = read_scheme(reader)
    config = read_family(reader, family, torch_dtype, max_model_len)
    reader.refuse_rest()
    check_quantization(quantization)
    return replace(config, quantization=quantization, scheme=scheme, has_class_head=has_class_head)


def read_dtype(path: Path, dtype: str) -> torch.dtype:
    """Return the dtype in which to compute a checkpoint directory; ``dtype`` is that of :func:`load_model_config`.

    Raises ``ValueError``.
    """
    return _dtype(ConfigReader.open(path), path, dtype)


def check_quantization(quantization: str | None) -> None:
    """Raise ``ValueError`` unless ``quantization`` is a way to quantize at load, or None."""
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization must be {', '.join(QUANTIZATIONS)} or none, not {quantization!r}")


def _family(reader: ConfigReader) -> tuple[Family, bool]:
    """Return the family, and whether the model has a class head."""
    names = reader.take("architectures") or []
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise reader.error("architectures", f"must name one of {known}")
    if names[0] in CLASSIFIERS:
        return CLASSIFIERS[names[0]], True
    if names[0] not in ARCHITECTURES:
        raise reader.error("architectures", f"is not supported: must be one of {known}")
    return ARCHITECTURES[names[0]], False


def _dtype(reader: ConfigReader, path: Path, dtype: str) -> torch.dtype:
    if dtype == "auto":
        declared = reader.take("dtype") or reader.take("torch_dtype") or stored_dtype(path)
        # vLLM serves such a checkpoint in float16, which no kernel here computes on a CPU. bfloat16 loses 3 of the 10
        # bits of fraction; as its range is wider, no value overflows.
        if declared == "float16":
            OF_PROCESS.begin(
                "less_precision",
                "the checkpoint is float16, which no kernel of a CPU computes: it is served as bfloat16, with 3 bits "
                "less; dtype float32 keeps all of it, in twice the memory, and so does float16 on a GPU",
            )
            return torch.bfloat16
        if declared not in _DTYPES:
            raise ValueError(f"the checkpoint's dtype {declared} is not supported: choose dtype float32 or bfloat16")
        return _DTYPES[declared]
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {dtype!r}")
    return _DTYPES[dtype]
