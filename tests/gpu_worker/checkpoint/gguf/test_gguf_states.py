"""GGUF files of models of which some layers keep a state: the logits of the model that was converted.

Entries, shapes and orders are those of ``lfm2.py``, ``qwen.py``, ``mamba.py`` and ``granite.py`` in ``conversion`` of
ggml-org/llama.cpp.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import encode
from tests.gpu_worker.models.transformers.test_states import Driver, draw
from tests.parity.state_checkpoints import SERVED, make_model
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.models.decoder import DecoderModel

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


ARCHITECTURES = {
    "lfm2": ("lfm2", gguf.MODEL_ARCH.LFM2, describe_lfm2, convert_lfm2),
    "qwen35": ("qwen3_5_text", gguf.MODEL_ARCH.QWEN35, describe_qwen35, convert_qwen35),
    "qwen35moe": ("qwen3_5_moe_text", gguf.MODEL_ARCH.QWEN35MOE, describe_qwen35, convert_qwen35),
    "qwen3next": ("qwen3_next", gguf.MODEL_ARCH.QWEN3NEXT, describe_qwen35, convert_qwen3_next),
    "granitehybrid": ("granitemoehybrid", gguf.MODEL_ARCH.GRANITE_HYBRID, describe_granite, convert_granite),
}
_FACTORS = {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
_ENTRIES: dict[str, dict[str, Any]] = {
    "granitehybrid": _FACTORS,
    "qwen35moe": {
        **{name: each for name, each in SERVED["qwen3_next"].items() if name != "intermediate_size"},
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    },
}


@torch.no_grad()
def write(path: Path, architecture: str, model: Any, kind: Kind) -> Path:
    """Write ``model`` with its matrices in ``kind``, and give it the numbers that the file stands for."""
    _, known, describe, convert = ARCHITECTURES[architecture]
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    describe(writer, model)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        is_matrix = tensor.dim() == 2 or ".experts." in name
        used = kind if is_matrix else Kind.F32
        if used is not Kind.F32:
            data, used = encode(tensor.contiguous().numpy(), used)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, used)))
        for own, piece in convert(name, tensor, config).items():
            stem, _, ending = own.replace(".dt_bias", ".dt_proj.bias").rpartition(".")
            stored = names.get_name(own) if own.endswith(("A_log", "mamba.D")) else f"{names.get_name(stem)}.{ending}"
            data, used = encode(piece.contiguous().numpy(), kind if is_matrix else Kind.F32)
            writer.add_tensor(stored, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_model(
    architecture: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As large as a block: one that lay in two heads would be rounded otherwise in the file's order.
    monkeypatch.setitem(SERVED["qwen3_5_text"], "linear_value_head_dim", 32)
    entries = _ENTRIES.get(architecture, {})
    if architecture == "qwen35moe":
        entries = entries | {"linear_value_head_dim": 32}
    check(architecture, make_model(ARCHITECTURES[architecture][0], **entries), kind, tmp_path)


@pytest.mark.parametrize("positions", ["nope", "rope"])
def test_a_granite_without_experts_has_its_mlp_in_two_parts(positions: str, tmp_path: Path) -> None:
    entries = {"num_local_experts": 0, "position_embedding_type": positions, "intermediate_size": 64}
    model = make_model("granitemoehybrid", **entries, **_FACTORS, shared_intermediate_size=64)
    check("granitehybrid", model, Kind.F32, tmp_path)


def test_an_older_qwen3_next_has_its_projections_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ARCHITECTURES["qwen3next"]

    def convert(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
        return {name: tensor} if "qkvz" in name else convert_qwen3_next(name, tensor, config)

    monkeypatch.setitem(ARCHITECTURES, "qwen3next", (*own[:3], convert))
    check("qwen3next", make_model("qwen3_next"), Kind.F32, tmp_path)


def check(architecture: str, model: Any, kind: Kind, directory: Path) -> None:
    """Compare the logits of a file with those of the model."""
    path = write(directory / "model.gguf", architecture, model, kind)
    assert served_how(EngineConfig(worker=WorkerConfig(model=str(path))), has_gpu=False).by == "built in"
    with torch.inference_mode():
        loaded = load_model(path, "float32")
    assert isinstance(loaded, DecoderModel)
    driver = Driver(loaded)
    row = driver.begin(draw(60, seed=1))
    driver.step((row, [(41, 0)]))
    driver.step((row, [(19, 0)]))
    with torch.inference_mode():
        expected = model(torch.tensor([row.tokens])).logits[0]
    torch.testing.assert_close(torch.cat(row.logits), expected, rtol=2e-3, atol=2e-3)
