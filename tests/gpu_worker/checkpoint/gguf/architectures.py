"""Writes models of transformers as GGUF files, as llama.cpp's converter does.

Names are those of the package gguf (``tensor_mapping.py``). Entries, and what is done to tensors, are those of
``conversion/base.py`` (``TextModel.set_gguf_parameters``) and, by architecture, of ``gemma.py``, ``phi.py``,
``gpt_oss.py``, ``deepseek.py``, ``olmo.py``, ``smollm.py``, ``granite.py``, ``glm.py``, ``mistral3.py`` and
``llama.py`` in ggml-org/llama.cpp.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.gpu_worker.checkpoint.gguf.files import encode

SHAPES = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 30}
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_key_value_heads": 4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
GROUPS = {"n_group": 4, "topk_group": 2}
LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + each / 8 for each in range(8)], "long_factor": [2.0 + each for each in range(8)],
}  # fmt: skip
PARTIAL = LONG | {"partial_rotary_factor": 0.75, "short_factor": LONG["short_factor"][:6], "long_factor": [2.0] * 6}
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
MINISTRAL_YARN = (
    YARN
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}
    | {
        "original_max_position_embeddings": 16  # so that queries of the prompt are scaled
    }
)
GRANITE = {
    "attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": 30, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199, "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_EXPERTS = {
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
OSS = {
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 30, "num_hidden_layers": 4,
    "rope_parameters": YARN | {"factor": 32.0, "original_max_position_embeddings": 16, "truncate": False},
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gemma2": ("gemma2", "gemma2", WINDOW, "built in"),
    "gemma3": ("gemma3", "gemma3_text", WINDOW | {"num_hidden_layers": 7}, "built in"),
    "gemma3, long": (
        "gemma3", "gemma3_text",
        WINDOW | {"num_hidden_layers": 7, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
        "built in",
    ),
    "gemma4": ("gemma4", "gemma4_text", GEMMA4, "transformers"),
    "gemma4, experts": ("gemma4", "gemma4_text", GEMMA4 | GEMMA4_EXPERTS, "transformers"),
    "phi3": ("phi3", "phi3", {"sliding_window": 30}, "built in"),
    "phi3, long": ("phi3", "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}, "built in"),
    "phi4 mini": (
        "phi3", "phi3",
        {"rope_parameters": PARTIAL, "original_max_position_embeddings": 128, "tie_word_embeddings": True},
        "transformers",
    ),
    "gpt-oss": ("gpt-oss", "gpt_oss", OSS, "built in"),
    "deepseek v2": (
        "deepseek2", "deepseek_v2",
        LATENT | GROUPS | {"rope_parameters": DEEPSEEK_YARN, "topk_method": "group_limited_greedy"},
        "built in",
    ),
    "deepseek v2 lite": (
        "deepseek2", "deepseek_v2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        "built in",
    ),
    "deepseek v3": (
        "deepseek2", "deepseek_v3",
        LATENT | GROUPS | {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "built in",
    ),
    "olmo2": ("olmo2", "olmo2", {}, "built in"),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5}, "built in"),
    "granite": ("granite", "granite", GRANITE, "transformers"),
    "granite, biases": ("granite", "granite", GRANITE | {"attention_bias": True, "mlp_bias": True}, "transformers"),
    "glm4": ("glm4", "glm4", {"head_dim": 16}, "transformers"),
    "ministral3": ("mistral3", "ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_YARN}, "transformers"),
    "mistral small 3": ("mistral3", "mistral", {"head_dim": 32, "sliding_window": None}, "built in"),
}  # fmt: skip
"""By what is tried: the architecture in the file, transformers' type, its entries, and what computes it here."""


def make(model_type: str, **entries: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **SHAPES | entries)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() == 1 and "inv_freq" not in name:  # zeros and ones would hide one that is left out
            mean = float("norm" in name) * (not model_type.startswith("gemma"))
            torch.nn.init.normal_(tensor, mean, 0.1)
    return model.eval()


Writer = gguf.GGUFWriter
PERMUTED = ("granite", "mistral3", "smollm3", "llama")
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def write_model(
    path: Path, architecture: str, model: Any, kind: Kind = Kind.F32, change: Callable[[Writer], None] | None = None
) -> Path:
    """Write ``model`` with the matrices of its layers in ``kind``, and give it the numbers that the file stands for."""
    if kind is not Kind.F32:
        _round(model, kind)
    writer = Writer(path, architecture)
    _describe(writer, architecture, model.config)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], model.config.num_hidden_layers)
    for name, tensor in _tensors(architecture, model):
        stem, _, ending = name.rpartition(".")
        stored = _ROUTERS.get(name.rpartition(".layers.")[2].partition(".")[2]) or names.get_name(stem)
        assert stored is not None, name
        if stored in _ROUTERS.values():
            stored, ending = f"blk.{name.split('.')[2]}.{stored}", "scale"
        used = kind if tensor.dim() >= 2 and ending == "weight" and _is_rounded(name) else Kind.F32
        data, used = encode(tensor.detach().contiguous().numpy(), used)
        writer.add_tensor(f"{stored}.{ending}", data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ROUTERS = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
"""Tensors of Gemma 4 that the package's names leave out."""


def _is_rounded(name: str) -> bool:
    """Return whether a matrix is quantized; routers never are, and the two parts of MLA's are not here."""
    return not any(part in name for part in ("router", "mlp.gate.", "k_b_proj", "v_b_proj", "kv_b_proj"))


@torch.no_grad()
def _round(model: Any, kind: Kind) -> None:
    """Give a model the numbers that its matrices have once quantized, which quantizing again does not change."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or not _is_rounded(f"{name}.") or name.endswith("bias"):
            continue
        # gpt-oss's experts are stored in transformers as [experts, in, out].
        swaps = parameter.dim() == 3 and model.config.model_type == "gpt_oss"
        stored = parameter.transpose(1, 2) if swaps else parameter
        data, used = encode(stored.contiguous().numpy(), kind)
        rounded = torch.from_numpy(gguf.quants.dequantize(data, used)).view(stored.shape)
        parameter.copy_(rounded.transpose(1, 2) if swaps else rounded)


def _describe(writer: Writer, architecture: str, config: Any) -> None:
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if architecture == "deepseek2" else config.to_dict()["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    if (head_size := config.to_dict().get("head_dim")) and architecture not in ("granite", "deepseek2"):
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    elif full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(full.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(full.get("beta_slow", 1.0))
    elif full["rope_type"] == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    if architecture in PERMUTED:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_size or config.hidden_size // config.num_attention_heads)
    if architecture in _DESCRIBE:
        _DESCRIBE[architecture](writer, config)


def _describe_gemma2(writer: Writer, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _describe_gemma3(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _describe_gemma4(writer: Writer, config: Any) -> None:
    _describe_gemma3(writer, config)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    entries = config.to_dict()
    overrides = next(iter(entries["per_layer_config"].values()))
    full, local = overrides["head_dim"], entries["head_dim"]
    if "num_key_value_heads" in overrides:
        heads = {
            "sliding_attention": entries["num_key_value_heads"],
            "full_attention": overrides["num_key_value_heads"],
        }
        writer.add_head_count_kv([heads[kind] for kind in config.layer_types])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(local)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.use_double_wide_mlp:
        first = config.num_hidden_layers - config.num_kv_shared_layers
        sizes = [config.intermediate_size * (2 if layer >= first else 1) for layer in range(config.num_hidden_layers)]
        writer.add_feed_forward_length(sizes)
    part = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * part + [1e30] * (full // 2 - part), np.float32))


def _describe_phi3(writer: Writer, config: Any) -> None:
    rope, size = config.rope_parameters, config.hidden_size // config.num_attention_heads
    original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * size))
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for name in ("long", "short"):
            factors = torch.tensor(rope[f"{name}_factor"], dtype=torch.float32).numpy()
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _describe_gpt_oss(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _describe_deepseek2(writer: Writer, config: Any) -> None:
    is_3 = config.model_type == "deepseek_v3"
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_3 else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if (size := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * size)


def _describe_granite(writer: Writer, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _describe_glm4(writer: Writer, config: Any) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _describe_mistral3(writer: Writer, config: Any) -> None:
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


_DESCRIBE = {
    "gemma2": _describe_gemma2,
    "gemma3": _describe_gemma3,
    "gemma4": _describe_gemma4,
    "phi3": _describe_phi3,
    "gpt-oss": _describe_gpt_oss,
    "deepseek2": _describe_deepseek2,
    "granite": _describe_granite,
    "glm4": _describe_glm4,
    "mistral3": _describe_mistral3,
}


def _tensors(architecture: str, model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the file holds, by names of Hugging Face's classes that the package gguf knows."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif architecture in PERMUTED and (part := name.split(".")[-2]) in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            yield name, _permute(tensor, heads)
        elif name.endswith(("sinks", "layer_scalar")):
            yield f"{name}.weight", tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.removesuffix("_bias") + ".bias", tensor
        elif name.endswith("kv_b_proj.weight"):
            by_head = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
            keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield name.replace("kv_b", "v_b"), values
        elif ".experts." in name:
            yield from _experts(architecture, name, tensor)
        else:
            yield name, tensor


def _experts(architecture: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    layer, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    part = part.removesuffix("_bias")
    if architecture == "gemma4":
        yield f"{name}.weight", tensor
        return
    if architecture == "gpt-oss" and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if part == "down_proj":
        yield f"{layer}.down_proj.{kind}", tensor
    elif architecture == "gpt-oss":
        yield f"{layer}.gate_proj.{kind}", tensor[:, ::2]
        yield f"{layer}.up_proj.{kind}", tensor[:, 1::2]
    else:
        gates, ups = tensor.chunk(2, 1)
        yield f"{layer}.gate_proj.{kind}", gates
        yield f"{layer}.up_proj.{kind}", ups


def _permute(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
