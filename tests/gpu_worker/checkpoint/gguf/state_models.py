"""Writes models of which some layers keep a state as GGUF files, as llama.cpp's converter does.

Entries, shapes and orders are those of ``lfm2.py``, ``qwen.py``, ``mamba.py``, ``granite.py``, ``falcon_h1.py``,
``nemotron.py`` and ``kimi_linear.py`` in ``conversion`` of ggml-org/llama.cpp.

    python -m tests.gpu_worker.checkpoint.gguf.state_models MODEL qwen35

writes ``MODEL-bf16.gguf`` from a checkpoint, without a tokenizer, for ``tokenloom bench peers`` with llama.cpp.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import encode
from tests.parity.state_checkpoints import SERVED

Pieces = dict[str, torch.Tensor]
"""Tensors as a file holds them, by the names from which llama.cpp's map derives its own."""


def describe_lfm2(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
    writer.add_head_count_kv([0 if each == "conv" else config.num_key_value_heads for each in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def describe_qwen35(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    if (count := getattr(config, "num_experts", 0)) > 0:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * 0.25))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)


def describe_granite(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_feed_forward_length(config.intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    attends = [each in ("attention", "full_attention") for each in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)


def describe_mamba2(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    _describe_ssm(writer, config.conv_kernel, config.state_size, config.n_groups, config.num_heads, config.head_dim)


def describe_nemotron(writer: gguf.GGUFWriter, model: Any) -> None:
    config, kinds = model.config, model.config.layers_block_type
    writer.add_context_length(2**20)
    writer.add_feed_forward_length([config.intermediate_size * (kind == "mlp") for kind in kinds])
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(84)  # as published files have it, whose heads have 128 numbers
    writer.add_rope_scaling_finetuned(False)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    heads, size = config.mamba_num_heads, config.mamba_head_dim
    _describe_ssm(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, heads, size)


def describe_falcon(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_value_length(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    heads, size = config.mamba_n_heads, config.mamba_d_head
    _describe_ssm(writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, heads, size)


def describe_kimi(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_context_length(config.model_max_length)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([int(each == "full_attention") for each in config.layer_types])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(72)  # as the published file has it
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_token)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.num_expert_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)


def _describe_ssm(writer: gguf.GGUFWriter, kernel: int, state: int, groups: int, heads: int, size: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * size)


def convert_lfm2(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    return {name: tensor.squeeze(1) if tensor.dim() > 2 else tensor}


def convert_qwen35(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    """Return a tensor with the heads of values by their number within a head of keys."""
    groups, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    keys = 2 * groups * config.linear_key_head_dim

    def tiled(part: torch.Tensor, dim: int, head: int) -> torch.Tensor:
        by_head = part.unflatten(dim, (groups, heads // groups, head))
        return by_head.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        tensor = tiled(tensor, 0, 1)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = torch.cat((tensor[:keys], tiled(tensor[keys:], 0, size)))
    if name.endswith("in_proj_z.weight"):
        tensor = tiled(tensor, 0, size)
    if name.endswith("linear_attn.out_proj.weight"):
        tensor = tiled(tensor, 1, size)
    return convert_qwen3_next(name, tensor, config)


def convert_qwen3_next(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    if name.endswith("gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return {name.replace("gate_up", "gate") + ".weight": gate, name.replace("gate_up", "up") + ".weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": tensor}
    if name.endswith("in_proj_qkvz.weight"):
        keys = config.linear_key_head_dim
        values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        by_head = tensor.unflatten(0, (config.linear_num_key_heads, -1))
        *parts, z = (part.flatten(0, 1) for part in by_head.split([keys, keys, values, values], dim=1))
        stem = name.removesuffix("qkvz.weight")
        return {f"{stem}qkv.weight": torch.cat(parts), f"{stem}z.weight": z}
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    return {name: tensor.squeeze()}


def convert_granite(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    stem = name.rpartition(".")[0]
    if name.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
        gate, up = tensor.chunk(2, dim=-2)
        if name.endswith("experts.gate_up_proj"):
            return {f"{stem}.gate.weight": gate, f"{stem}.up.weight": up}
        stem = stem.replace("shared_mlp.input_linear", "mlp.shared_experts" if config.num_local_experts else "mlp")
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{stem}.down.weight": tensor}
    if name.endswith("router.weight"):
        return {name.replace("router", "router.layer"): tensor}
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): tensor}
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return {name: tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)}
    if name.endswith(("A_log", "mamba.D")):
        return {name: (-tensor.exp() if "A_log" in name else tensor)[:, None]}
    if name.endswith("mamba.norm.weight"):
        return {name: tensor.view(config.mamba_n_groups, -1)}
    return {name: tensor.squeeze(1) if "conv1d.weight" in name else tensor}


def convert_mamba2(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    if name.endswith(("A_log", ".D")):
        tensor = (-tensor.exp() if "A_log" in name else tensor)[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        tensor = tensor.view(getattr(config, "n_groups", 0) or config.mamba_n_groups, -1)
    return {name: tensor.squeeze(1) if "conv1d.weight" in name else tensor}


def convert_nemotron(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    name = name.replace("model.", "backbone.", 1)
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return convert_mamba2(name, tensor, config)


def convert_falcon(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    """Return a tensor times the factors of its class."""
    gate, down = config.mlp_multipliers
    inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, keys, keys, config.mamba_n_heads])
    parts = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    factors: dict[str, Any] = {
        "down_proj.weight": down,
        "gate_proj.weight": gate,
        "k_proj.weight": config.key_multiplier * config.attention_in_multiplier,
        "q_proj.weight": config.attention_in_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "mamba.in_proj.weight": config.ssm_in_multiplier * parts,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    of_this = [factor for ending, factor in factors.items() if name.endswith(f".{ending}") or name == ending]
    return convert_mamba2(name, tensor * of_this[0] if of_this else tensor, config)


def convert_kimi(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
    name = name.replace("forget_gate.", "")
    if name.endswith("conv1d.weight"):
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {name.replace("conv1d", f"{part}_conv1d"): each[None] for part, each in parts}
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("kv_b_proj.weight"):
        keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split(
            [config.qk_nope_head_dim, config.v_head_dim], 1
        )
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    if name.endswith("e_score_correction_bias"):
        own = name.replace("mlp.gate.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction.bias")
        return {own: tensor}
    return convert_qwen3_next(name, tensor, config) if ".experts." in name else {name: tensor}


ARCHITECTURES = {
    "lfm2": ("lfm2", gguf.MODEL_ARCH.LFM2, describe_lfm2, convert_lfm2),
    "qwen35": ("qwen3_5_text", gguf.MODEL_ARCH.QWEN35, describe_qwen35, convert_qwen35),
    "qwen35moe": ("qwen3_5_moe_text", gguf.MODEL_ARCH.QWEN35MOE, describe_qwen35, convert_qwen35),
    "qwen3next": ("qwen3_next", gguf.MODEL_ARCH.QWEN3NEXT, describe_qwen35, convert_qwen3_next),
    "granitehybrid": ("granitemoehybrid", gguf.MODEL_ARCH.GRANITE_HYBRID, describe_granite, convert_granite),
    "mamba2": ("mamba2", gguf.MODEL_ARCH.MAMBA2, describe_mamba2, convert_mamba2),
    "nemotron_h": ("nemotron_h", gguf.MODEL_ARCH.NEMOTRON_H, describe_nemotron, convert_nemotron),
    "falcon-h1": ("falcon_h1", gguf.MODEL_ARCH.FALCON_H1, describe_falcon, convert_falcon),
    "kimi-linear": ("kimi_linear", gguf.MODEL_ARCH.KIMI_LINEAR, describe_kimi, convert_kimi),
}
FACTORS = {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
ENTRIES: dict[str, dict[str, Any]] = {
    "granitehybrid": FACTORS,
    # Powers of two, by which a block's numbers and its scale stay exact.
    "falcon-h1": {
        "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 2.0,
        "embedding_multiplier": 4.0,
        "key_multiplier": 2.0,
        "lm_head_multiplier": 0.25,
        "mlp_multipliers": [0.5, 2.0],
        "ssm_in_multiplier": 0.5,
        "ssm_multipliers": [0.5, 2.0, 1.0, 4.0, 0.25],
        "ssm_out_multiplier": 2.0,
    },
    # transformers clamps steps of time from below in chunks alone, and llama.cpp nowhere.
    "nemotron_h": {"time_step_min": 1e-9},
    "qwen35moe": {
        **{name: each for name, each in SERVED["qwen3_next"].items() if name != "intermediate_size"},
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    },
}


@torch.no_grad()
def write(
    path: Path,
    architecture: str,
    model: Any,
    kind: Kind,
    changed: Mapping[str, Any] | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write ``model`` with its matrices in ``kind``, and give it the numbers that the file stands for. ``changed``:
    entries beside, or instead of, those of the model: numbers, texts and lists of numbers. ``change`` adds more."""
    _, known, describe, convert = ARCHITECTURES[architecture]
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    if (heads := getattr(config, "num_attention_heads", 0)) > 0:
        writer.add_head_count(heads)
        writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rope_parameters"):
        writer.add_context_length(config.max_position_embeddings)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    describe(writer, model)
    if change is not None:
        change(writer)
    for entry, value in (changed or {}).items():
        adds = {list: writer.add_array, float: writer.add_float32, str: writer.add_string}
        adds.get(type(value), writer.add_uint32)(entry, value)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    biases = [each for each in model.named_buffers() if each[0].endswith("e_score_correction_bias")]
    for name, tensor in [*model.named_parameters(), *biases]:
        is_matrix = tensor.dim() == 2 or ".experts." in name
        used = kind if is_matrix else Kind.F32
        if used is not Kind.F32:
            data, used = encode(tensor.contiguous().numpy(), used)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, used)))
        for own, piece in convert(name, tensor, config).items():
            stem, _, ending = own.replace(".dt_bias", ".dt_proj.bias").rpartition(".")
            # The map names modules, but that norm of Falcon-H1 by its weight, which has no ending in files.
            is_bare = own.endswith(("A_log", ".D", "pre_ff_layernorm.weight"))
            stored = names.get_name(own) if is_bare else f"{names.get_name(stem)}.{ending}"
            data, used = encode(piece.contiguous().numpy(), kind if is_matrix else Kind.F32)
            writer.add_tensor(stored, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    checkpoint, architecture = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    write(Path(f"{checkpoint}-bf16.gguf"), architecture, model, Kind.BF16, {"tokenizer.ggml.model": "none"})


if __name__ == "__main__":
    main()
