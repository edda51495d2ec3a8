"""Says where a file holds the tensors that models ask for by the names of Hugging Face's classes, and how it stores
some of them otherwise than those classes do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenloom.gguf.gguf_file import GgufFile

from .config import LONG_FACTORS, PLAIN_NAMES, ROPE_FACTORS, SHORT_FACTORS
from .families import has_experts

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MAMBA2 = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_OF_AN_ARCHITECTURE: dict[str, dict[str, str]] = {
    "gemma2": _AROUND,
    "gemma3": _AROUND,
    "gemma4": {
        **_AROUND,
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    },
    "olmo2": _AFTER,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "lfm2": {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    "qwen35": _QWEN_DELTA,
    "qwen35moe": _QWEN_DELTA,
    # Older files have the first four parts as one, in the order of Hugging Face's class.
    "qwen3next": _QWEN_DELTA | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    "granitehybrid": {
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.output_linear",
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
        "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_dt.bias": "mamba.dt_bias",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    "falcon-h1": {
        "output_norm.weight": "model.final_layernorm.weight",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_dt.bias": "mamba.dt_bias",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    "kimi-linear": {
        **_LATENT,
        "ssm_conv1d_q": "self_attn.q_conv1d",
        "ssm_conv1d_k": "self_attn.k_conv1d",
        "ssm_conv1d_v": "self_attn.v_conv1d",
        "ssm_f_a": "self_attn.f_a_proj",
        "ssm_f_b": "self_attn.f_b_proj",
        "ssm_g_a": "self_attn.g_a_proj",
        "ssm_g_b": "self_attn.g_b_proj",
        "ssm_beta": "self_attn.b_proj",
        "ssm_dt.bias": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
        "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
        "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
    },
    "mamba2": _MAMBA2,
    "nemotron_h": {
        **_MAMBA2,
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    "deepseek2": {
        **_LATENT,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
}
"""What architectures call the parts of a layer beside, or otherwise than, :data:`_OF_A_LAYER`, and tensors of the whole
model otherwise than :data:`_WHOLE_MODEL`; an entry with a point is the whole name."""
_STATES = {
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), "linear_attn"),
    **dict.fromkeys(("granitehybrid", "falcon-h1"), "mamba"),
    **dict.fromkeys(("mamba2", "nemotron_h"), "mixer"),
    "kimi-linear": "self_attn",
}
"""What classes call the part of a layer that keeps a state, of those files that also hold the vectors of a head."""
_VECTORS = {"ssm_a": "A_log", "ssm_d": "D"}
"""Tensors with a number for each head, whose names do not end with a kind."""
_BARE_NORM = "ffn_norm"
"""A weight of Falcon-H1, whose name does not either."""
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors that hold a matrix [experts, out, in], or a bias [experts, out], of every expert of a layer."""
_STACKED = {"ffn_gate_up_exps.weight": "gate_up_proj", "ffn_down_exps.weight": "down_proj"}
"""Tensors that Gemma 4's class has for all experts, too."""
_EXPERT_PARTS = {"granitehybrid": "block_sparse_moe", "kimi-linear": "block_sparse_moe"}
"""What classes call the part of a layer with its experts; others call it mlp."""
_IN_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LAYERS = dict.fromkeys(("mamba2", "nemotron_h"), "backbone.layers")
"""What classes call their layers; others call them model.layers."""

_PAIRED = ("llama", "granite", "granitehybrid", "mistral3", "nemotron_h", "smollm3")
"""Architectures whose heads llama.cpp's converter stores as Llama's are rotated."""
_SHIFTED_NORMS = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose norms have one added to their weight, which llama.cpp stores with it."""
_KEYS, _VALUES = "attn_k_b", "attn_v_b"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Says where a tensor is found."""

    stored: str
    """The tensor's name in the file."""
    heads: int | None = None
    """Not None: the rows of each of so many heads are stored in pairs, as llama.cpp rotates Llama's."""
    expert: int | None = None
    """Not None: the tensor holds the matrices of all experts, and this one is meant."""
    shift: float = 0.0
    """What the stored numbers are too large by."""
    values: str | None = None
    """Not None: ``stored`` holds each head's part for keys [heads, in, out], and the tensor of this name, [heads, out,
    in], that for values, which follows it in the head's rows."""


def places(file: GgufFile) -> dict[str, TensorPlace]:
    """Return the file's tensors by the names that models ask for. A tensor that has none keeps its own name."""
    architecture = file.metadata["general.architecture"]
    names, layers = _OF_A_LAYER | _OF_AN_ARCHITECTURE.get(architecture, {}), _LAYERS.get(architecture, "model.layers")
    found = {}
    for name in file.tensors.keys() - {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}:
        if further := _further_layer(file, name):
            found[further] = TensorPlace(name)
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+|shortconv\.\w+)\.(\w+)", name)
        if layer is None:
            found[names.get(name, _WHOLE_MODEL.get(name, name))] = _place(file, name, "")
            continue
        prefix, part, kind = f"{layers}.{layer[1]}", layer[2], layer[3]
        dimensions = len(file.tensors[name].shape)
        if architecture == "gemma4" and f"{part}.{kind}" in _STACKED:
            found |= _stacked(file, name, f"{prefix}.experts", _STACKED[f"{part}.{kind}"])
        elif part in _OF_EXPERTS and dimensions == (2 if kind == "bias" else 3):
            found |= _by_expert(file, name, f"{prefix}.{_EXPERT_PARTS.get(architecture, 'mlp')}", f"{part}.{kind}")
        elif architecture in ("deepseek2", "kimi-linear") and part in (_KEYS, _VALUES):
            found |= _of_heads(file, layer[1])
        elif f"{part}.{kind}" in names:
            found[f"{prefix}.{names[f'{part}.{kind}']}"] = _place(file, name, part)
        else:
            own = f"{prefix}.{names[part]}.{kind}" if part in names else name
            found[own] = _place(file, name, part)
    is_mixtral = architecture == "llama" and has_experts(file)
    return {_mixtral_name(name): place for name, place in found.items()} if is_mixtral else found


def _further_layer(file: GgufFile, name: str) -> str:
    """Return the name of a tensor that is none of the layers' matrices: a vector of what keeps a state, such as the
    rates of decay, or a part of the head that drafts, behind the layers; empty: it is another one."""
    metadata, architecture = file.metadata, file.metadata["general.architecture"]
    if architecture not in _STATES or (layer := re.match(r"blk\.(\d+)\.", name)) is None:
        return ""
    count, further = (metadata.get(f"{architecture}.{entry}", 0) for entry in ("block_count", "nextn_predict_layers"))
    if int(layer[1]) in range(count - further, count):  # a layer behind all of them is refused by its own name
        return f"mtp.{name}"
    rest, layers = name[layer.end() :], _LAYERS.get(architecture, "model.layers")
    if rest == _BARE_NORM:
        return f"{layers}.{layer[1]}.{_OF_AN_ARCHITECTURE[architecture].get(rest, _OF_A_LAYER[rest])}.weight"
    part = _VECTORS.get(rest)
    return f"{layers}.{layer[1]}.{_STATES[architecture]}.{part}" if part else ""


def _place(file: GgufFile, name: str, part: str) -> TensorPlace:
    architecture, heads, shift = file.metadata["general.architecture"], None, 0.0
    if architecture in _PAIRED and part in ("attn_q", "attn_k"):
        heads = _head_counts(file.metadata, architecture)[part == "attn_k"]
    if architecture in _SHIFTED_NORMS and name.endswith("norm.weight") and part != "ssm_norm":
        shift = 1.0
    return TensorPlace(name, heads, shift=shift)


def _head_counts(metadata: Mapping[str, Any], architecture: str) -> tuple[Any, Any]:
    queries = metadata.get(f"{architecture}.attention.head_count")
    keys = metadata.get(f"{architecture}.attention.head_count_kv", queries)
    return queries, max(keys, default=None) if isinstance(keys, list) else keys


def _of_heads(file: GgufFile, layer: str) -> dict[str, TensorPlace]:
    """Return the place of the matrix from compressed vectors to keys and values, which newer files store as two; empty:
    the file has it as one, too."""
    if f"blk.{layer}.attn_kv_b.weight" in file.tensors:
        return {}
    keys, values = f"blk.{layer}.{_KEYS}.weight", f"blk.{layer}.{_VALUES}.weight"
    return {f"model.layers.{layer}.self_attn.kv_b_proj.weight": TensorPlace(keys, values=values)}


def _by_expert(file: GgufFile, name: str, prefix: str, part: str) -> dict[str, TensorPlace]:
    """Return the places of each expert's matrix or bias in a tensor of all, of which ``part`` is what the file calls
    it."""
    matrix, _, kind = part.partition(".")
    own = _OF_EXPERTS[matrix]
    if file.metadata["general.architecture"] == "kimi-linear":
        own = _IN_MIXTRAL[own]
    count = file.tensors[name].shape[0]
    return {f"{prefix}.experts.{expert}.{own}.{kind}": TensorPlace(name, expert=expert) for expert in range(count)}


def _stacked(file: GgufFile, name: str, prefix: str, part: str) -> dict[str, TensorPlace]:
    """Return the place of a tensor of all experts, or of each expert's matrix where they are in blocks, which only
    matrices can be."""
    tensor = file.tensors[name]
    if tensor.kind in PLAIN_NAMES:
        return {f"{prefix}.{part}": TensorPlace(name)}
    return {f"{prefix}.{expert}.{part}": TensorPlace(name, expert=expert) for expert in range(tensor.shape[0])}


def _mixtral_name(name: str) -> str:
    """Return the name that Mixtral's class has for what Qwen's classes call ``name``."""
    before, between, after = name.partition(".mlp.")
    for own, mixtral in _IN_MIXTRAL.items():
        after = after.replace(own, mixtral)
    return f"{before}.block_sparse_moe.{after}" if between else name
