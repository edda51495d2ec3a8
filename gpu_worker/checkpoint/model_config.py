"""Describes a model: its shapes and switches, as a checkpoint's configuration states them. It imports torch only where
a dtype is asked for, so that checks before a start read what the engine reads."""

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokenloom.engine_core.data.config import KVCacheDtype

from ..parallel.sharding import WHOLE, Dimension, Shard
from .files.architectures import DECODERS, DecoderTraits, Family
from .files.text_part import MediaSwitches
from .quantization.entries import Scheme
from .rope_config import DynamicScaling, RopeConfig

if TYPE_CHECKING:
    import torch

DtypeName = Literal["float32", "bfloat16", "float16"]
"""The dtypes in which models are computed."""


def as_torch(name: str) -> "torch.dtype":
    """Return PyTorch's dtype of this name."""
    import torch  # imported here: it takes seconds and 200 MB, which the checks before a start do not need

    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTSwitches:
    """Holds the switches that only OPT's class has."""

    embedding_size: int
    """The size of token embeddings; if it is not the hidden size, two matrices lead from the one to the other."""
    norm_before: bool
    """Whether a layer normalizes the input of attention and MLP; otherwise their sums (opt-350m)."""
    final_norm: bool
    norms_have_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSwitches:
    """Holds what only multi-head latent attention knows: it caches one compressed vector of a token for all heads, from
    which each head's keys and values follow (DeepSeek-AI, 2024)."""

    rank: int
    """The size of the compressed vector."""
    rope_size: int
    """The size of the rotated key, which all heads share and which lies behind the compressed vector in the cache."""
    key_size: int
    """The size of the part of a head's query and key that is not rotated."""
    value_size: int
    query_rank: int | None
    """The size to which a token's queries are compressed; None: they are not."""
    is_interleaved: bool
    """Whether dimensions 2i and 2i + 1 rotate together, and not i and i + rope_size / 2."""

    @property
    def query_size(self) -> int:
        """Return the size of one head's query."""
        return self.key_size + self.rope_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSwitches:
    """Holds how DeepSeek's routers choose experts: from the best groups of experts only, by shares or by independent
    scores."""

    num_groups: int = 1
    groups_per_token: int = 1
    """The groups among whose experts a token's are."""
    has_independent_scores: bool
    """Whether a score is the sigmoid of its own logit, to which a stored bias is added for the choice, and a group is
    as good as its two best experts; otherwise scores are a softmax, and a group is as good as its best expert."""
    scale: float = 1.0
    """The factor on the weights of a token's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSwitches:
    """Holds what only layers with experts know."""

    count: int
    per_token: int
    """How many experts compute each token."""
    intermediate_size: int
    shared_size: int = 0
    """The intermediate size of the expert that computes every token; 0: none."""
    normalizes_weights: bool = False
    """Whether the weights of a token's experts add up to one."""
    scales_inputs: bool = False
    """Whether a token's one expert computes the token times the sigmoid of its score (Llama 4); otherwise what the
    experts compute is weighted."""
    router: RouterSwitches | None = None
    """None: the experts with the largest shares are chosen, and a gate weighs the expert of every token."""
    layers: tuple[bool, ...]
    """[num_layers]: whether the layer has experts, and not one MLP."""
    own: range | None = None
    """The places of the experts that this rank holds whole; None: its part of all of them. Place i has expert i, unless
    experts are moved by their load."""
    num_redundant: int = 0
    """Places on all ranks beside one for each expert."""

    @property
    def num_places(self) -> int:
        """Return for how many experts the ranks have places."""
        return self.count + self.num_redundant


class KVShape(NamedTuple):
    """Holds the shape of a token's keys, and of its values, in one layer."""

    num_heads: int
    head_size: int
    """As in the cache: whole 16s."""


class StateShape(NamedTuple):
    """Holds the shapes of what one layer keeps of a sequence between tokens."""

    channels: int
    """Of the short convolution before the recurrence."""
    taps: int
    """How many of the convolution's last inputs are kept, in the model's dtype."""
    recurrent: tuple[int, int, int] | None = None
    """The recurrence's state, in float32: heads x keys x values, or heads x head size x state size; None: none."""

    def nbytes(self, itemsize: int) -> int:
        """Return the size for one sequence, in bytes. ``itemsize``: of the model's dtype."""
        return sum(self.part_bytes(itemsize))

    def part_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the size of the convolution's part, and of the recurrence's if there is one."""
        conv = self.channels * self.taps * itemsize
        return (conv, 4 * prod(self.recurrent)) if self.recurrent else (conv,)

    def __str__(self) -> str:
        recurrent = f"+{'x'.join(map(str, self.recurrent))}" if self.recurrent else ""
        return f"{self.taps}x{self.channels}{recurrent}"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Describes what the layers of a model keep of a sequence between tokens, beside keys and values."""

    layers: tuple[StateShape | None, ...]
    """What each layer keeps, or each of those that keep anything; None: nothing."""
    form: str
    """Names how states are computed: another form rounds them differently."""
    chunk: int = 1
    """The chunks of a prompt end at multiples of so many tokens, on which the form's sums depend; 1: they end anywhere,
    and no sum depends on it."""

    @property
    def name(self) -> str:
        """Name the shapes: slots of equal names and dtypes can be exchanged."""
        counts = Counter(str(shape) for shape in self.layers if shape is not None)
        return "+".join(f"{count}x{shape}" for shape, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Holds the factors of a layer of Falcon-H1, which are multiplied into its weights."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    gate: float = 1.0
    """On what the MLP's activation is applied to."""
    down: float = 1.0
    mixer_in: float = 1.0
    mixer_out: float = 1.0
    mixer_parts: tuple[float, ...] = (1.0,) * 5
    """On gates, inputs, B, C and steps of time of Mamba-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerSwitches:
    """Holds the switches of layers that keep a state in the place of attention, or beside it."""

    kind: Literal["delta", "kimi", "mamba2", "conv"]
    """The gated delta rule, the same with a decay of each channel of a key (Kimi), Mamba-2, or nothing but a short
    convolution."""
    heads: int = 0
    """Of values (delta), or of inputs (mamba2)."""
    groups: int = 0
    """Heads of keys and queries, or groups of what takes their place; each serves heads / groups heads."""
    all_groups: int = 0
    """Those of the whole model; not read if one rank has them all."""
    head_size: int = 0
    state_size: int = 0
    """The size of a key."""
    taps: int
    """How many earlier tokens the short convolution reads."""
    has_conv_bias: bool = False
    has_bias: bool = False
    """Whether the matrices before and behind have biases."""
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Of the step of time (mamba2)."""
    has_norm: bool = True
    """Whether what mamba2 computes has RMSNorm."""
    norms_first: bool = False
    """Whether it has that before it is multiplied by its gate."""
    is_beside_attention: bool = False
    """Whether the layers that keep a state attend, too, and add both (Falcon-H1)."""
    layers: tuple[bool, ...]
    """For each layer of the decoder, whether it keeps a state; the others attend, but for ``mlps``."""
    mlps: tuple[bool, ...] = ()
    """For each layer, whether it is an MLP alone, which mixes no tokens; empty: none is."""

    @property
    def inner_size(self) -> int:
        """Return the size of a token's values of all heads."""
        return self.heads * self.head_size

    def num_attending(self, end: int | None = None) -> int:
        """Return how many of the layers before ``end`` attend; None: of all."""
        kept = self.layers[:end]
        if self.is_beside_attention:
            return len(kept)
        return len(kept) - sum(kept) - sum(self.mlps[:end])

    @property
    def conv_channels(self) -> int:
        """Return the channels of the convolution; 0: those of the hidden state."""
        return self.inner_size + 2 * self.groups * self.state_size


_HEAD_STEP = 16

SCALE_BYTES = 4
"""The size of the scale, a float32, of a token's keys or values in one head of an int8 KV cache."""

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
    dtype_name: DtypeName
    """The dtype of weights, activations and, unless ``kv_cache_dtype`` says otherwise, the KV cache."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    """How many layers attend, each with a KV cache; beside them there may be those of ``mixer``. 1 where none attends:
    KV blocks then hold rows that no token writes, and name prefixes."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    """How many tokens prompt and output may have together."""
    norm_eps: float
    hidden_act: str
    """One of ``supported.ACTIVATION_NAMES``, or ``clamped_swiglu``, the gate of gpt-oss."""
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...] = ()
    """[num_layers]: how each layer rotates its heads; empty: the model has learned absolute positions."""
    norms_rotated_heads: bool = False
    """Whether query and key heads have RMSNorm without weights in the layers that rotate them."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    """The factor on token embeddings, exact in ``dtype``."""
    attention_softcap: float | None = None
    """As :class:`~..attention.attention_backend.ScoreRule` says."""
    post_norm_eps: float | None = None
    """Of the norms of what attention and MLP compute; None: ``norm_eps``."""
    logit_scale: float = 1.0
    """The factor on logits, before any limit."""
    logit_softcap: float | None = None
    """A logit x becomes logit_softcap * tanh(x / logit_softcap); None: it stays x."""
    opt: OPTSwitches | None = None
    experts: ExpertSwitches | None = None
    latent: LatentSwitches | None = None
    """The model then has one KV head, of ``head_size`` = rank + rope_size elements, and no values of their own."""
    num_further_layers: int = 0
    """Layers behind the last one in the checkpoint, which draft further tokens (MTP). They are not computed."""
    attention_scales: tuple[float, ...]
    """[num_layers]: the factor on query times key."""
    sliding_windows: tuple[int | None, ...]
    """[num_layers]: how many positions a token sees, itself included; None: all."""
    attention_chunks: tuple[int | None, ...] = ()
    """[num_layers]: a token at position p sees those from p // chunk * chunk on; None: its window says what it sees.
    Empty: there are no chunks."""
    kv_shapes: tuple[KVShape, ...] = ()
    """[num_layers]: the keys of each layer, if they have different numbers of heads; ``num_kv_heads`` and ``head_size``
    are then those of the layers with the largest rows, of which each smaller row is a whole part."""
    kv_sources: tuple[int, ...] = ()
    """[num_layers]: the layer whose keys and values each one attends to; empty: its own."""
    mixer: MixerSwitches | None = None
    """What the layers compute that keep a state; None: all layers attend."""
    residual_scale: float = 1.0
    """The factor on what a part of a layer adds to the hidden state."""
    multipliers: Multipliers | None = None
    """None: layers have no other factors."""
    states: StateLayout | None = None
    """What layers keep of a sequence beside its KV; None: nothing."""
    quantization: str | None = None
    """How matrices are quantized at load: one of ``QUANTIZATIONS`` or None."""
    has_class_head: bool = False
    """Whether classes of prompts are computed instead of logits of tokens."""
    has_output: bool = True
    """Whether the checkpoint has an output layer; without one or a class head, only hidden states are pooled."""
    scheme: Scheme | None = None
    """How the checkpoint stores quantized matrices, from ``quantization_config``; None: it stores plain tensors."""

    media: MediaSwitches | None = None
    """What images change; None: prompts have none."""
    cross_rows: int = 0
    """Rows of the sound beside a prompt, to which each layer attends behind its own tokens; 0: prompts have none."""

    alignment_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of those whose attention to a sound says when a token is spoken; empty: none is named."""
    median_filter_width: int = 7
    """How many rows of a sound are smoothed together for that."""

    shard: Shard = WHOLE
    """Which part of each layer this rank computes; the numbers of heads, and the intermediate sizes, are its own."""
    first_layer: int = 0
    """The number in the model of this rank's first layer."""
    layers_of_model: int = 0
    """Those of all stages; 0: this rank has them all."""
    is_last_stage: bool = True
    """Whether the model's last layer is among this rank's."""
    samples: bool = True
    """Whether this rank gets all logits, and draws tokens."""
    is_copy: bool = False
    """Whether the rank that draws is in another copy of the model, with which this one divides prompts."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """``auto``: the KV cache has ``dtype``; ``int8``: 8 bits, with a scale for each head of each token; ``fp8``: floats
    of 8 bits (e4m3); see ``scales_kv``."""

    scales_kv: bool = False
    """Whether keys and values are divided by numbers of the checkpoint before they become floats of 8 bits."""

    @property
    def vocabulary(self) -> Dimension:
        """Return which tokens this rank has in its embeddings and its output layer."""
        return self.shard.vocabulary(self.vocab_size)

    @property
    def computes_logits(self) -> bool:
        """Return whether this rank computes logits: all of them, or those of its tokens."""
        has_part = self.is_last_stage and not isinstance(self.vocabulary, int) and not self.is_copy
        return self.samples or has_part

    @property
    def own_layers(self) -> range:
        """Return this rank's layers by their numbers in the model."""
        count = self.num_layers if self.mixer is None else len(self.mixer.layers)
        return range(self.first_layer, self.first_layer + count)

    @property
    def traits(self) -> DecoderTraits:
        """Return what the family's classes fix, for a family of ``families.DECODERS``."""
        return DECODERS[self.family]

    def shows_whole_images(self, layer: int) -> bool:
        """Return whether a token of an image sees the image's later tokens in one of this rank's layers."""
        kind = None if self.media is None else self.media.seen_whole
        return kind == "all" or (kind == "sliding" and self.sliding_windows[layer] is not None)

    @property
    def embedding_size(self) -> int:
        """Return the size of a token's embedding, which few models change before the first layer."""
        return self.hidden_size if self.opt is None else self.opt.embedding_size

    @property
    def cache_head_size(self) -> int:
        """Return how many elements of the KV cache a head takes: whole 16s, of which the last may be zeros.

        The C++ kernels read whole vectors, and every backend keeps to it, so that they can exchange blocks. A
        compressed vector takes exactly its elements.
        """
        if self.latent is not None:
            return self.head_size
        return -(-self.head_size // _HEAD_STEP) * _HEAD_STEP

    @property
    def dtype(self) -> "torch.dtype":
        """Return the dtype of :attr:`dtype_name`."""
        return as_torch(self.dtype_name)

    @property
    def kv_dtype(self) -> "torch.dtype":
        """Return the dtype of the KV cache."""
        return as_torch({"auto": self.dtype_name, "int8": "int8", "fp8": "float8_e4m3fn"}[self.kv_cache_dtype])

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Return for each layer how many positions a token sees at most, itself included, and thus for how many KV is
        kept; None: all."""
        layers = zip_longest(self.sliding_windows, self.attention_chunks)
        return tuple(window if chunk is None else chunk for window, chunk in layers)

    @property
    def kv_row_bytes(self) -> int:
        """Return the size of one token's keys, or values, in one KV head, with their scale if they have one."""
        scale_bytes = SCALE_BYTES if self.kv_cache_dtype == "int8" else 0
        return self.cache_head_size * self.kv_dtype.itemsize + scale_bytes

    @property
    def kv_planes(self) -> int:
        """Return how many rows of a token a KV head has in one layer: a key and a value, or a compressed vector."""
        return 2 if self.latent is None else 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the size of one token's keys and values in all layers, in bytes."""
        return self.kv_planes * self.num_layers * self.num_kv_heads * self.kv_row_bytes

    @property
    def state_bytes(self) -> int:
        """Return the size of what all layers keep of one sequence beside its KV, in bytes; 0: nothing."""
        itemsize = self.dtype.itemsize if self.states else 0
        return sum(shape.nbytes(itemsize) for shape in self.states.layers if shape) if self.states else 0

    @property
    def rope_stretch(self) -> str | None:
        """Return for which context beyond that of the training the engine's options let heads rotate; None: for
        none."""
        stretched = [rope.scaling for rope in self.ropes if rope.is_stretched]
        if not stretched:
            return None
        return f"dynamic-rope-{stretched[0].length}" if isinstance(stretched[0], DynamicScaling) else "long-rope"
