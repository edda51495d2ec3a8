"""The table of the architectures that are built in, and what the classes of each family of decoders fix. It does not
import torch: checks before the start read it.

To add a decoder, write its class into :data:`ARCHITECTURES` and its family into :data:`DECODERS`. What differs by
checkpoint is a field of ``checkpoint.model_config.ModelConfig``, which ``checkpoint.load_config`` reads from
``config.json``; an entry that nothing reads is refused by name. ``models.decoder`` computes the layers, and
``models.load_model`` chooses a module beside it for a family whose forward pass differs. ``checkpoint.served_how``
says how the other kinds of checkpoints are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "smollm3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "llama4",
    "muse_glimmer",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "granitemoehybrid",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "kimi_linear",
    "gpt2",
    "opt",
    "whisper",
    "transformers",
]
"""``transformers``: any class of that library; its modules hold what the switches of ``ModelConfig`` hold."""

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
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Llama4ForCausalLM": "llama4",
    "MuseGlimmerForCausalLM": "muse_glimmer",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Mamba2ForCausalLM": "mamba2",
    "NemotronHForCausalLM": "nemotron_h",
    "FalconH1ForCausalLM": "falcon_h1",
    "KimiLinearForCausalLM": "kimi_linear",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "WhisperForConditionalGeneration": "whisper",
}
"""Names every architecture that is built in and generates text."""
WITHOUT_MODULES = ("MuseGlimmerForCausalLM", "WhisperForConditionalGeneration")
"""Names those that transformers' modules cannot compute: their class is a part of another one, or has an encoder."""

LEARNED_POSITIONS = ("gpt2", "opt", "whisper")
"""Names the families with an embedding of each position, which ``models.learned_positions`` computes."""

STATEFUL = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "lfm2", "mamba2", "nemotron_h", "falcon_h1"),
    "kimi_linear",
)
"""Names the families of which some layers keep a state between tokens."""

CLASS_HEAD = "ForSequenceClassification"
"""Ends the names of classes with a head for classes of prompts."""
CLASSIFIERS: dict[str, Family] = {
    name.replace("ForCausalLM", CLASS_HEAD): family
    for name, family in ARCHITECTURES.items()
    if family not in (*LEARNED_POSITIONS, "llama4", "muse_glimmer", *STATEFUL)
}
"""Names the decoders with a class head instead of an output layer."""
BACKBONES: dict[str, Family] = {name.replace(CLASS_HEAD, "Model"): family for name, family in CLASSIFIERS.items()}
"""Names the decoders that were saved without any head, so that they only compute embeddings."""

EncoderFamily = Literal["bert", "roberta", "modernbert"]
_ENCODER_NAMES: dict[str, EncoderFamily] = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
    "Camembert": "roberta",
    "ModernBert": "modernbert",
}
ENCODERS: dict[str, EncoderFamily] = {
    f"{name}{ending}": family
    for name, family in _ENCODER_NAMES.items()
    for ending in ("Model", "ForMaskedLM", CLASS_HEAD)
}
"""Names the encoders. Their heads for masked tokens are not used."""
STATIC = "StaticModel"
"""Names a table of vectors of tokens, without a network (model2vec)."""
BUILT_IN = frozenset((*ARCHITECTURES, *CLASSIFIERS, *BACKBONES, *ENCODERS, STATIC))
"""Names all architectures that are built in."""
_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "muse_glimmer": "muse_glimmer_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
CLASS_OF_TYPE: dict[str, str] = {
    # The names of these families are the types of models which read images.
    **{_TEXT_TYPES.get(family, family): name for name, family in ARCHITECTURES.items()},
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "camembert": "CamembertModel",
    "modernbert": "ModernBertModel",
}
"""The class that a ``model_type`` stands for, if ``architectures`` names none that is known."""

_MASKED = """Albert ConvBert Deberta DebertaV2 DistilBert Electra Ernie EuroBert Gte JinaEmbeddingsV3 MPNet MegatronBert
    MobileBert NomicBert RoFormer XLMRobertaXL"""
_HEADLESS = """BloomModel GPT2Model GPTNeoModel GPTNeoXModel Gemma3TextModel GemmaModel MT5EncoderModel OPTModel
    T5EncoderModel UMT5EncoderModel"""
MODULE_ENCODERS = frozenset(
    (*_HEADLESS.split(), *(f"{name}{ending}" for name in _MASKED.split() for ending in ("Model", "ForMaskedLM")))
)
"""Names the classes of transformers whose modules compute the vectors of whole prompts."""


def is_encoder(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether steps compute whole prompts of the architecture ``name``, because its tokens attend to later ones
    or because transformers' modules compute it without a KV cache. ``values`` is the content of ``config.json``."""
    looks_ahead = values.get("is_causal") is False or values.get("use_bidirectional_attention") in (True, "all")
    return name in ENCODERS or name in MODULE_ENCODERS or name == STATIC or looks_ahead


ACTIVATION_NAMES = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
"""Names the activation functions, as checkpoints do; ``layers.activation.ACTIVATIONS`` computes them."""

CLAMPED_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""The numbers of gpt-oss's gate, ``layers.activation.clamped_swiglu``, by the entries that may state them."""


NormOrder = Literal["before", "after", "around"]
"""Where a layer normalizes: the input of attention and of the MLP, their result, or both."""
QKNorm = Literal["head", "unit", "all"]
"""What RMSNorm is applied to before rotation: each query and key head, the same without weights, or all of a token's
queries and all its keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """Holds the differences between families that their configurations do not state."""

    norm_order: NormOrder = "before"
    norm_shift: float = 0.0
    """What is added to each stored norm weight."""
    shifts_last_norm: bool = True
    """Whether that is so of the norm behind the last layer too."""
    norms_embeddings: bool = False
    """Whether embeddings of tokens have RMSNorm without weights."""
    norm_eps: float = 1e-6
    norm_eps_entry: str = "rms_norm_eps"
    qk_norm: QKNorm | None = None
    head_size: int | None = None
    """The default of ``head_dim``; None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """The default of ``num_key_value_heads``; None: num_attention_heads."""
    rope_theta: float = 10_000.0
    activation_entry: str = "hidden_act"
    activation: str = "silu"
    is_tied: bool = False
    has_qkv_bias: bool = False
    """Whether queries, keys and values always have a bias."""
    may_have_attention_bias: bool = False
    """Whether the configuration may ask for biases of all four matrices of attention."""
    attention_bias: bool = False
    """Whether those four have biases if the configuration says nothing."""
    has_mlp_bias: bool = False
    """Whether the matrices of MLPs, and the router of experts, always have a bias."""
    has_gate: bool = False
    """Whether what attention computes is multiplied by the sigmoid of a projection of its input."""
    has_sinks: bool = False
    """Whether each head has a score that enters the sum of the softmax and weighs no value."""
    may_have_mlp_bias: bool = False
    is_fused: bool = False
    """Whether the checkpoint stores queries, keys and values as one matrix, and gate and up as another."""
    is_gemma: bool = False
    """Whether embeddings are scaled, and the configuration states the scale of attention and limits of scores."""
    is_interleaved: bool = False
    """Whether dimensions 2i and 2i + 1 of a head rotate together, and not i and i + head_size / 2."""
    mlp_name: str = "mlp"
    """What the checkpoint calls a layer's MLP, with experts or without."""
    has_fused_mlp: bool = False
    """Whether only gate and up are one matrix, those of experts excepted."""
    state_name: str = ""
    """What the checkpoint calls the part of a layer that keeps a state, in the place of its attention."""
    has_single_parts: bool = False
    """Whether a layer is one part after one norm, which mixes tokens or is an MLP without a gate."""
    rotated_share: float | None = None
    """The default of ``partial_rotary_factor``, the share of a head that rotates; None: whole heads do."""
    has_gated_queries: bool = False
    """Whether the gate of attention is stored with the queries: a head's query, then its gate."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """What the checkpoint calls parts of the names of Llama's tensors, after them."""
    is_latent: bool = False
    """Whether the KV cache holds one compressed vector of a token for all heads (multi-head latent attention)."""


_GEMMA2 = DecoderTraits(
    norm_order="around",
    norm_shift=1.0,
    head_size=256,
    num_kv_heads=4,
    activation_entry="hidden_activation",
    activation="gelu_pytorch_tanh",
    is_tied=True,
    may_have_attention_bias=True,
    is_gemma=True,
)
_QWEN_DELTA = DecoderTraits(
    norm_shift=1.0,
    qk_norm="head",
    head_size=256,
    may_have_attention_bias=True,
    has_gate=True,
    has_gated_queries=True,
    state_name="linear_attn",
    rotated_share=0.25,
)
_MAMBA2 = DecoderTraits(
    norm_eps=1e-5,
    norm_eps_entry="layer_norm_epsilon",
    has_single_parts=True,
    state_name="mixer",
    stored_names=(
        ("model.embed_tokens", "backbone.embeddings"),
        ("model.layers", "backbone.layers"),
        ("model.norm", "backbone.norm_f"),
        ("input_layernorm", "norm"),
        ("self_attn", "mixer"),
    ),
)
_GEMMA3 = replace(_GEMMA2, qk_norm="head", rope_theta=1_000_000.0)

# A family is built in where that takes at most 1 / 1.15 of the CPU that transformers' modules take for a decode step:
# llama 1.36 times with one row and 1.17 with eight, gemma2 1.55 and 1.21 (8 layers of 768, bfloat16).
DECODERS: dict[str, DecoderTraits] = {
    "llama": DecoderTraits(may_have_attention_bias=True, may_have_mlp_bias=True),
    "mistral": DecoderTraits(),
    "qwen2": DecoderTraits(has_qkv_bias=True),
    "qwen3": DecoderTraits(qk_norm="head", head_size=128, may_have_attention_bias=True),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "phi3": DecoderTraits(norm_eps=1e-5, is_fused=True),
    "olmo2": DecoderTraits(norm_order="after", norm_eps=1e-5, qk_norm="all", may_have_attention_bias=True),
    "smollm3": DecoderTraits(
        num_kv_heads=4, rope_theta=2_000_000.0, is_tied=True, may_have_attention_bias=True, may_have_mlp_bias=True
    ),
    "mixtral": DecoderTraits(norm_eps=1e-5, num_kv_heads=8, rope_theta=1_000_000.0),
    "qwen2_moe": DecoderTraits(has_qkv_bias=True),
    "qwen3_moe": DecoderTraits(qk_norm="head", head_size=128, may_have_attention_bias=True),
    "gpt_oss": DecoderTraits(
        norm_eps=1e-5,
        head_size=64,
        num_kv_heads=8,
        rope_theta=150_000.0,
        may_have_attention_bias=True,
        attention_bias=True,
        has_mlp_bias=True,
        has_sinks=True,
    ),
    "deepseek_v2": DecoderTraits(is_latent=True, may_have_attention_bias=True, may_have_mlp_bias=True),
    "deepseek_v3": DecoderTraits(is_latent=True, may_have_attention_bias=True),
    "llama4": DecoderTraits(
        norm_eps=1e-5,
        head_size=128,
        num_kv_heads=8,
        rope_theta=500_000.0,
        may_have_attention_bias=True,
        is_interleaved=True,
        mlp_name="feed_forward",
    ),
    "muse_glimmer": DecoderTraits(
        norm_order="around",
        norm_shift=1.0,
        shifts_last_norm=False,
        norms_embeddings=True,
        norm_eps=1e-5,
        qk_norm="unit",
        head_size=128,
        num_kv_heads=2,
        activation_entry="hidden_activation",
        may_have_attention_bias=True,
        has_gate=True,
    ),
    "qwen3_next": _QWEN_DELTA,
    "qwen3_5": _QWEN_DELTA,
    "qwen3_5_moe": _QWEN_DELTA,
    "granitemoehybrid": DecoderTraits(
        may_have_attention_bias=True,
        has_fused_mlp=True,
        mlp_name="shared_mlp",
        state_name="mamba",
        stored_names=(
            ("shared_mlp.gate_up_proj", "shared_mlp.input_linear"),
            ("shared_mlp.down_proj", "shared_mlp.output_linear"),
            ("block_sparse_moe.shared_experts.gate_up_proj", "shared_mlp.input_linear"),
            ("block_sparse_moe.shared_experts.down_proj", "shared_mlp.output_linear"),
            ("block_sparse_moe.gate", "block_sparse_moe.router.layer"),
        ),
    ),
    "lfm2": DecoderTraits(
        norm_eps=1e-5,
        norm_eps_entry="norm_eps",
        qk_norm="head",
        rope_theta=1_000_000.0,
        is_tied=True,
        state_name="conv",
        stored_names=(
            ("input_layernorm", "operator_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("self_attn.q_norm", "self_attn.q_layernorm"),
            ("self_attn.k_norm", "self_attn.k_layernorm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("model.norm", "model.embedding_norm"),
        ),
    ),
    "falcon_h1": DecoderTraits(
        norm_eps=1e-5,
        num_kv_heads=8,
        may_have_attention_bias=True,
        may_have_mlp_bias=True,
        mlp_name="feed_forward",
        state_name="mamba",
        stored_names=(("post_attention_layernorm", "pre_ff_layernorm"), ("model.norm", "model.final_layernorm")),
    ),
    "kimi_linear": DecoderTraits(norm_eps=1e-5, is_latent=True, may_have_attention_bias=True, state_name="self_attn"),
    "mamba2": _MAMBA2,
    "nemotron_h": replace(
        _MAMBA2,
        head_size=128,
        num_kv_heads=8,
        activation_entry="mlp_hidden_act",
        activation="relu2",
        may_have_attention_bias=True,
        may_have_mlp_bias=True,
        mlp_name="mixer",
    ),
}
"""The families that ``models.decoder`` computes."""
